"""Rules: how each operator is computed on split values."""
