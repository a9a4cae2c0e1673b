"""Benchmark of the host's work in a training step by cells."""
