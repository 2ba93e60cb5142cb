"""One HTML file with the viewer's page and answers about some runs: it opens without a server."""
