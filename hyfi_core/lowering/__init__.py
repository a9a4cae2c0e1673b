"""Lowering of a captured program to one rank's instructions."""
