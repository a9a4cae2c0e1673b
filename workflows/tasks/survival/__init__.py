"""Survival: the risk of a slide, from its time and whether it ended with the event."""
