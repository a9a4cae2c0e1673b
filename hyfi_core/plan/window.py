"""Windows: the input region that an output region needs.

kernel 3, stride 2, one row of padding (p) on either side of an input of 8 rows:

input      p 0 1 2 3 4 5 6 7 p
output 0   └─┬─┘
output 1       └─┬─┘
output 2           └─┬─┘
output 3               └─┬─┘       the padding at the end is not read
"""

from __future__ import annotations

from dataclasses import dataclass

from hyfi_core.plan.box import Box
from hyfi_core.plan.boxes import Boxes


@dataclass(frozen=True, slots=True)
class AxisWindow:
    """A sliding window along one axis.

    Attributes:
        kernel: taps.
        stride: step between outputs.
        padding: positions added before the first input; padding after the last follows from the number of outputs.
        dilation: distance between taps.
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def extent(self) -> int:
        """Number of positions from the first to the last tap."""
        return (self.kernel - 1) * self.dilation + 1

    def input_interval(self, start: int, stop: int) -> tuple[int, int]:
        """Return the half-open input interval that outputs ``[start, stop)`` read, not clipped to the map."""
        if stop <= start:
            return start, start
        first = start * self.stride - self.padding
        # From the first tap of the first output to the last tap of the last one.
        return first, (stop - 1) * self.stride - self.padding + self.extent

    def misses(self, inputs: int, outputs: int) -> bool:
        """Return whether some output reads no position of the map: all its taps are in the padding."""
        # Taps at most `inputs` apart cannot jump over the map.
        if self.dilation <= inputs:
            return False
        first = range(-self.padding, -self.padding + outputs * self.stride, self.stride)
        taps = range(0, self.extent, self.dilation)
        return any(not any(0 <= start + tap < inputs for tap in taps) for start in first)

    def cut(self, cut: int, inputs: int, outputs: int, balanced: int) -> int:
        """Return the output cut that moves the fewest positions across the input cut.

        Of several such cuts, it is the input cut if output positions are input positions, so that adding a block and
        its shortcut moves nothing; otherwise the most balanced one.

        Args:
            cut: first input position of the second of two neighbours.
            inputs: input positions.
            outputs: output positions.
            balanced: where an even division would cut.
        """
        # A part that is empty in the input is empty in the output.
        if cut <= 0 or cut >= inputs:
            return 0 if cut <= 0 else outputs
        # The first tap of output `near` is at the cut or just before it; outputs that read both sides are near it.
        near = (cut + self.padding) // self.stride
        reach = self.extent // self.stride + 1
        # Outputs further away read one side only, so a cut there would move more positions.
        candidates = {min(max(near + step, 0), outputs) for step in range(-reach, 2)}
        target = cut if self.stride == 1 and outputs == inputs else balanced
        return min(sorted(candidates), key=lambda out: (self._crossing(out, cut, inputs, outputs), abs(out - target)))

    def _crossing(self, out: int, cut: int, inputs: int, outputs: int) -> int:
        """Return how many input positions are sent across the input cut if the outputs are cut at ``out``."""
        before = max(0, min(self.input_interval(0, out)[1], inputs) - cut) if out > 0 else 0
        after = max(0, cut - max(self.input_interval(out, outputs)[0], 0)) if out < outputs else 0
        return before + after


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window over a map: one along each axis."""

    y: AxisWindow
    x: AxisWindow

    def input_box(self, output: Box) -> Box:
        """Return the input box that ``output`` needs; it extends beyond the map by the padding."""
        if output.empty:
            return Box(0, 0, 0, 0)
        y0, y1 = self.y.input_interval(output.y0, output.y1)
        x0, x1 = self.x.input_interval(output.x0, output.x1)
        return Box(y0, y1, x0, x1)

    def input_boxes(self, outputs: Boxes) -> Boxes:
        """Return the input box of each rank, as `input_box` does for one."""
        return outputs.each(self.y.input_interval, self.x.input_interval)
