"""Benchmark of two checkouts of this project, whose steps alternate."""
