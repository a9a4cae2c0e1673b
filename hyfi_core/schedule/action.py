"""Actions and schedules: ordered lists of actions for each rank of a replica, with a text form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from hyfi_core.errors import RequestError


class Verb(StrEnum):
    """The type of an action.

    F, B, I and W are *gang actions*: all ranks of the stage run them together, and wait for the data that they need.
    Receives are posted and sends are started without waiting for the other side.

    A backward is one action, B, or two: I, for which earlier stages wait, and W, for which only the reduction of
    gradients waits. Between the two a rank may do what others wait for::

        rank 0   F0 F1 .  I0 W0 I1 W1
        rank 1   .  F0 I0 F1 I1 W0 W1           rank 0 has I1's cotangents before W0 begins here
    """

    F = "F"
    """Forward of one micro-batch through one stage."""
    B = "B"
    """Backward of one micro-batch through one stage: the gradients of its inputs and of its weights."""
    I = "I"  # noqa: E741 - as in the literature on schedules
    """The first part of a backward: the gradients of the stage's inputs."""
    W = "W"
    """The rest of that backward: the gradients of the stage's weights."""
    SEND_F = "SEND_F"
    """Start sending the values that ``peer``, a later stage, takes from this one."""
    RECV_F = "RECV_F"
    """Post the receives of the values that this stage takes from ``peer``, an earlier one."""
    SEND_B = "SEND_B"
    """Start sending the gradients of the values that this stage took from ``peer``, an earlier stage."""
    RECV_B = "RECV_B"
    """Post the receives of the gradients of the values that ``peer``, a later stage, took from this one."""
    REDUCE = "REDUCE"
    """Start the reduction of a stage's gradients over all ranks that hold it."""
    SEND_G = "SEND_G"
    """Start sending a stage's gradients to the ranks that hold it in direction ``peer``."""
    RECV_G = "RECV_G"
    """Post the receives of a stage's gradients from the ranks that hold it in direction ``peer``."""

    __hash__ = str.__hash__  # Enum's runs Python code: slow for keys of dicts


COMPUTE = frozenset({Verb.F, Verb.B, Verb.I, Verb.W})
"""The gang actions."""
TO_INPUTS = frozenset({Verb.B, Verb.I})
"""The gang actions that compute the gradients of a stage's inputs."""
TO_WEIGHTS = frozenset({Verb.B, Verb.W})
"""The gang actions that complete a micro-batch's gradients of a stage's weights."""
_COUNTED = re.compile(r"(F|B|I|W)(\d+)\.s(\d+)\.d(\d+)")
_MESSAGE = re.compile(r"(SEND_F|SEND_B|RECV_F|RECV_B)(\d+)\.s(\d+)\.d(\d+)[<>]s(\d+)")
_GRADIENT = re.compile(r"(SEND_G|RECV_G)\.s(\d+)\.d(\d+)[<>]d(\d+)")
_REDUCE = re.compile(r"REDUCE\.s(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank.

    Attributes:
        verb: type of the action.
        stage: the stage that does it.
        direction: 0, or 1 for the opposite pipeline; 0 for REDUCE, which belongs to both.
        microbatch: index over both directions; None for REDUCE, SEND_G and RECV_G.
        peer: other stage of SEND_F, RECV_F, SEND_B and RECV_B; other direction of SEND_G and RECV_G; else None.
    """

    verb: Verb
    stage: int
    direction: int
    microbatch: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        """Return the text form: ``F0.s1.d0``, ``SEND_F0.s1.d0>s2``, ``RECV_F0.s2.d0<s1``, ``REDUCE.s1``."""
        if self.verb is Verb.REDUCE:
            return f"REDUCE.s{self.stage}"
        count = "" if self.microbatch is None else self.microbatch
        head = f"{self.verb}{count}.s{self.stage}.d{self.direction}"
        if self.verb in COMPUTE:
            return head
        arrow = "<" if self.verb.startswith("RECV") else ">"
        return f"{head}{arrow}{'d' if self.verb.endswith('_G') else 's'}{self.peer}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the text form.

        Raises:
            RequestError: the text is not an action.
        """
        if match := _COUNTED.fullmatch(text):
            verb, microbatch, stage, direction = match.groups()
            action = cls(Verb(verb), int(stage), int(direction), int(microbatch))
        elif match := _MESSAGE.fullmatch(text):
            verb, microbatch, stage, direction, peer = match.groups()
            action = cls(Verb(verb), int(stage), int(direction), int(microbatch), int(peer))
        elif match := _GRADIENT.fullmatch(text):
            verb, stage, direction, peer = match.groups()
            action = cls(Verb(verb), int(stage), int(direction), None, int(peer))
        elif match := _REDUCE.fullmatch(text):
            action = cls(Verb.REDUCE, int(match[1]), 0)
        else:
            action = None
        # Each action has one text only: ``F00.s1.d0`` matches the pattern, but is not the text of F0.
        if action is None or str(action) != text:
            example = "F0.s1.d0, SEND_F0.s1.d0>s2, RECV_F0.s2.d0<s1, SEND_G.s1.d1>d0 or REDUCE.s1"
            raise RequestError(f"{text!r} is not an action; write it like {example}")
        return action


@lru_cache(maxsize=1 << 16)
def act(verb: Verb, stage: int, direction: int, microbatch: int | None = None, peer: int | None = None) -> Action:
    """Return the action with these fields, always the same object, so that lookups in dicts are fast."""
    return Action(verb, stage, direction, microbatch, peer)


@dataclass(frozen=True)
class Schedule:
    """The actions of all ranks of one replica.

    Attributes:
        name: name of the algorithm.
        actions: for each rank, its actions in order.
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]

    def to_text(self) -> str:
        """Return one line for the name and one for each rank; the inverse of ``from_text``."""
        lines = [f"schedule {self.name}"]
        lines += [" ".join([f"{rank}:", *map(str, row)]) for rank, row in enumerate(self.actions)]
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Parse the result of ``to_text``.

        Raises:
            RequestError: the text is not a schedule; the message names the line.
        """
        lines = text.splitlines()
        if not lines or not lines[0].startswith("schedule "):
            raise RequestError("the first line of a schedule must be 'schedule NAME'")
        rows = []
        for rank, line in enumerate(lines[1:]):
            head, *words = line.split() or [""]
            if head != f"{rank}:":
                given = f"begins with {head!r}" if head else "is empty"
                raise RequestError(f"line {rank + 2} of a schedule {given}; it must begin with '{rank}:', its rank")
            rows.append(tuple(Action.parse(word) for word in words))
        return cls(lines[0].removeprefix("schedule "), tuple(rows))
