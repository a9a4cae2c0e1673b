"""Benchmarks of operators and layers, for ``hyfi doctor --measure``."""
