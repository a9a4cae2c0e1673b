"""Batch norm over ranks, and what it is computed from."""
