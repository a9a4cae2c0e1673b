"""Saving of training state while training continues."""
