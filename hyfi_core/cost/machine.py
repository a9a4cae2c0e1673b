"""The machine model: what computing and communicating cost, in one place for everything that compares the two."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MachineModel:
    """Seconds per message, byte and operation of one rank.

    The defaults are for processes on shared memory, each with one thread of a server's CPU, rounded from what
    ``python -m workflows.benchmarks.prices`` measures on such a machine.

    Attributes:
        message_s: one message with all that surrounds it, whatever its size.
        link_bytes_per_s: of a message.
        flops_per_s: of a convolution or a matrix product; a multiply-add counts as two.
        memory_bytes_per_s: of operators that do little with each pixel.
    """

    message_s: float = 50e-6
    link_bytes_per_s: float = 2.5e9
    flops_per_s: float = 100e9
    memory_bytes_per_s: float = 16e9

    def operator_s(self, flops: float, touched_bytes: float) -> float:
        """Return the time of an operator, which either arithmetic or memory bounds (the roofline model).

        Args:
            flops: that it computes.
            touched_bytes: that it reads and writes.
        """
        return max(flops / self.flops_per_s, touched_bytes / self.memory_bytes_per_s)

    def messages_s(self, messages: int, received_bytes: float) -> float:
        """Return the time until this many messages, with so many bytes together, have been received."""
        return messages * self.message_s + received_bytes / self.link_bytes_per_s


DEFAULT_MACHINE = MachineModel()
