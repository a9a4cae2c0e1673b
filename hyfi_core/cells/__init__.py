"""Cells: ranks of one process that take turns, for images larger than memory."""
