"""Starts processes and sees that all of them end."""
