"""Saving of a run while it trains."""
