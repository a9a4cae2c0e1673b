"""Aggregators of tile encoders: the features of a slide's tiles become its logits. Plain PyTorch."""
