"""Slide files of all formats behind one protocol."""
