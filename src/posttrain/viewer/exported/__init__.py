"""One HTML file with the viewer's page and responses about some runs: it opens without a server."""
