"""Averages of the weights that are validated and predicted with in place of the trained ones."""
