"""Checks of a run: its numbers are finite, and a resumed run has the same data."""
