"""Generator of ``docs/operators.md``: every operator with a rule, from the table of operators.

Written by ``python -m hyfi_core.lowering.operator_table > docs/operators.md``.
"""

from __future__ import annotations

import inspect
from collections import defaultdict

from hyfi_core.rules.operator_facts import OperatorFacts
from hyfi_core.rules.table import OPERATORS

HEAD = """\
# Supported operators

A model is captured with `torch.export` as a graph of these operators. Each has a rule that says which pixels a rank \
needs from others, so that the result is that of one process on any grid, also for odd sizes and empty parts.

An operator without a rule runs on the gathered map if that is not larger than `plan.gather_bytes` (32 MiB by \
default), and on one rank without limit. Otherwise it is refused when the engine is created: the message names the \
operator, the module that calls it, and what would work. [Your own model](own-model.md#operators) lists what \
is sent for which operator.

The table also says what autograd keeps of each until its backward, and how `hyfi plan` models its time; \
the records are in `hyfi_core/rules`.

Names are those of PyTorch's ATen operators without `aten.` and `.default`: `conv2d`, `max_pool2d`, `mean.dim`.

<!-- Written by `python -m hyfi_core.lowering.operator_table > docs/operators.md`; the texts are in hyfi_core/rules. -->
"""


_KEPT = {
    "other factors": "a factor, if another one has a gradient",
    "inputs and places": "inputs, and the place of each maximum",
}


def document() -> str:
    """Return the whole page as Markdown."""
    ruled = {text: op for text, op in OPERATORS.items() if op.rule is not None and text.startswith("aten.")}
    instead = {_short(text): op.instead for text, op in OPERATORS.items() if op.instead is not None}
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for text, facts in ruled.items():
        cells = _summary(facts), _KEPT.get(facts.keeps, facts.keeps), facts.kind.replace("_", " ")
        groups[cells].append(_short(text))
    rows = [_row(_code(names), *cells) for cells, names in sorted(groups.items(), key=_by_first_name)]
    refused = [_row(_code([name]), text) for name, text in sorted(instead.items())]
    head = ["| operators | what they are | kept for backward | time modelled as |", "|---|---|---|---|"]
    table = ["## With a rule", "", f"{len(ruled)} operators.", "", *head, *rows]
    return "\n".join([HEAD, *table, "", "## What to use instead", "", "| operator | use |", "|---|---|", *refused, ""])


def _row(*cells: str) -> str:
    return f"| {' | '.join(text.replace('|', chr(92) + '|') for text in cells)} |"


def _summary(facts: OperatorFacts) -> str:
    """Return the first paragraph about the rule of an operator."""
    # Rules for several operators are partials or wrapped: the docstring is that of the function within.
    text = inspect.getdoc(inspect.unwrap(facts.rule)) or "" if facts.rule is not None else ""
    return text.partition("\n\n")[0].replace("\n", " ").replace("``", "`")


def _short(name: str) -> str:
    return name.removeprefix("aten.").removesuffix(".default")


def _by_first_name(group: tuple[tuple[str, str, str], list[str]]) -> str:
    return min(name.lstrip("_") for name in group[1])


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names, key=lambda name: name.lstrip("_")))


if __name__ == "__main__":
    print(document(), end="")
