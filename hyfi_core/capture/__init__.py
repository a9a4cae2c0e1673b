"""Capture of the user's module as a program."""
