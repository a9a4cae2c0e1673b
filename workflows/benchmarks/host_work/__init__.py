"""Benchmark of what the host does in a training step by cells."""
