"""The error of one slide, which does not concern other slides."""


class FeatureError(Exception):
    """The features of a slide cannot be computed or written; the message is for the user."""
