"""Optimizers of published papers that PyTorch does not have."""
