"""Benchmark of the tasks: how well `hyfi train` learns slides whose truth is known, against what the truth allows."""
