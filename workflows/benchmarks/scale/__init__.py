"""Benchmark of planning and starting many ranks."""
