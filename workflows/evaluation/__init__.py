"""Evaluation of models on held-out slides, during and after training."""
