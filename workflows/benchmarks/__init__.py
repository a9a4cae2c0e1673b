"""Benchmarks; each prints ratios between measurements of the same run."""
