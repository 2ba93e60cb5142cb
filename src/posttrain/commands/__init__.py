"""One module per command of the `posttrain` program; cli.py imports the one that is run."""
