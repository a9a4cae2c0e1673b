"""Forecasts of steps with bags, and their best plans: seconds and memory, from the needs of one tile."""
