"""Ranks of one process that take turns: images larger than memory."""
