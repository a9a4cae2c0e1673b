"""Benchmark of a loader's decoding worker."""
