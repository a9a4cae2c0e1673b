"""Averages of the weights, which replace the trained weights in validation and prediction."""
