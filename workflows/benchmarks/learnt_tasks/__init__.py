"""Benchmark of the tasks: what `hyfi train` learns of slides whose truth is known, beside what that truth allows."""
