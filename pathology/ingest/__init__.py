"""Slides become a store."""
