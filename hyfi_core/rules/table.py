"""The table of operators: the record of each, from all families. A new operator needs one record beside its rule.

A rule determines how the output is split and which box of the input each rank needs for its part, and emits the local
call. If it takes the layout of its output from ``builder.same_pixels`` or ``builder.with_margins``, the operator can
be part of a fused run, in which ranks compute margins. Other operators end a run; their inputs are owned parts.
"""

from __future__ import annotations

from hyfi_core.capture.program import Operator
from hyfi_core.rules import batch_norm, channel, entries, norm, pointwise, product, random, reduction, shape, softmax
from hyfi_core.rules.moves import interpolate, place, resize, slices
from hyfi_core.rules.operator_facts import UNKNOWN, OperatorFacts
from hyfi_core.rules.windows import line_windows, patches, sliding

_FAMILIES = (
    *(batch_norm, channel, entries, norm, pointwise, product, random, reduction, shape, softmax),
    *(interpolate, line_windows, patches, place, resize, slices, sliding),
)


def _text(name: str) -> str:
    """Return the text of an operator from its key in ``FACTS``: ``aten.conv2d.default`` from ``conv2d``."""
    if name.startswith("hyfi."):
        return name
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


OPERATORS: dict[str, OperatorFacts] = {
    _text(name): record for family in _FAMILIES for name, record in family.FACTS.items()
}
"""Text of an operator, such as ``aten.conv2d.default`` -> its record."""


def facts_of(op: Operator) -> OperatorFacts:
    """Return the record of an operator; ``UNKNOWN`` for one without."""
    return OPERATORS.get(op.text, UNKNOWN)
