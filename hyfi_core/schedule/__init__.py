"""Schedules as data: generated, lowered, simulated and drawn; standard library only."""

from hyfi_core.schedule.action import Action, Schedule, Verb

__all__ = ["Action", "Schedule", "Verb"]
