"""Colours of training images."""
