"""Operators with their own backward."""
