"""Code for the sandbox's own interpreter: it imports only the standard library, nothing else of this package."""
