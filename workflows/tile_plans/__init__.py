"""Forecasts of steps of bags: seconds and memory from what a tile needs, and the best plans."""
