"""The commands of the `posttrain` program; cli.py imports only the module of the one that is run."""
