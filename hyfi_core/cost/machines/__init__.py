"""Machines to plan for."""
