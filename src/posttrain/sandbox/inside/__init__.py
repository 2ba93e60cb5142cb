"""What runs in the sandbox's own interpreter: the standard library only, and nothing that imports the rest of ours."""
