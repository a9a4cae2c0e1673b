"""Synthetic H&E-like slides: real pyramidal TIFFs whose class is a rare local structure."""
