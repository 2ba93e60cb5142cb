"""Run folders as plain responses for a page, an exported file and a notebook.  Without torch and without a server."""
