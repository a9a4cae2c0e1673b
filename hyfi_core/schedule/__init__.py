"""When things happen: schedules as data, made, lowered, tried dry and drawn; standard library only."""

from hyfi_core.schedule.action import Action, Schedule, Verb

__all__ = ["Action", "Schedule", "Verb"]
