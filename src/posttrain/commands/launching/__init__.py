"""The processes of `posttrain launch`: started here, or placed by Ray."""
