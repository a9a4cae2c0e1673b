"""Errors of one slide, which other slides do not have."""


class FeatureError(Exception):
    """The features of a slide cannot be computed or written; the message is for the user."""
