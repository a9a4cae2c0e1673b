"""Benchmark of tissue masks and pen marks: the same whatever the resolution of the store."""
