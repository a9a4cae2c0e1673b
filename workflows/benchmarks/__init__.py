"""Benchmarks; each prints ratios to something that is measured in the same run."""
