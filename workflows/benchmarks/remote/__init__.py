"""Benchmark of stores that are far away: on object storage, and on a network disk."""
