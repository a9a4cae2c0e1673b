"""Ordinal: each slide has one of several grades, which have an order."""
