"""A program becomes one rank's instructions."""
