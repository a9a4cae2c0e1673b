"""Benchmark of checkpoints: what they cost a trainer."""
