"""Calling functions that a user wrote in processes of their own, which a deadline or a crash ends without harm."""
