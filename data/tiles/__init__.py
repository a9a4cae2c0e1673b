"""Tiles of stored slides: which of them show tissue, and their pixels at any resolution."""
