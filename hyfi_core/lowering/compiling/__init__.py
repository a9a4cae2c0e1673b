"""Compiling of segments: graphs, the processes that compile them, and what runs them."""
