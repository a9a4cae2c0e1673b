"""How good a model is on held-out slides, during training and after it."""
