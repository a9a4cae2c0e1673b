"""Benchmark of tile encoders that are trained end to end."""
