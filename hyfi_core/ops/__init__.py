"""Autograd pairs over communication."""
