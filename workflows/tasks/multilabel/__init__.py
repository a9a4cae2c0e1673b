"""Multilabel: each slide has any number of several labels."""
