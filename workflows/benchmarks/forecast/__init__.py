"""Forecasts of steps and of memory against measured ones; see ``__main__``."""
