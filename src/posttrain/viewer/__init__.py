"""Run folders as plain answers for a page, an exported file and a notebook.  Without torch and without a server."""
