"""Benchmark of predictions of one huge image by several ranks in cells."""
