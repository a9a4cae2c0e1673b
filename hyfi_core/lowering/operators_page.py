"""Generator of ``docs/operators.md``: every operator with a rule, from the table of rules.

Written by ``python -m hyfi_core.lowering.operators_page > docs/operators.md``.
"""

from __future__ import annotations

import inspect
from collections import defaultdict

from hyfi_core.lowering.lower import ALTERNATIVES
from hyfi_core.rules.builder import Rule
from hyfi_core.rules.table import RULES

HEAD = """\
# Supported operators

A model is captured with `torch.export` as a graph of these operators. Each has a rule that says which pixels a rank \
needs from others, so that the result is that of one process on any grid, also for odd sizes and empty parts.

An operator without a rule runs on the gathered map if that is not larger than `plan.gather_bytes` (32 MiB by \
default), and on one rank without limit. Otherwise it is refused when the engine is created: the message names the \
operator, the module that calls it, and what would work. [Your own model](own-model.md#operators) lists what \
is sent for which operator.

Names are those of PyTorch's ATen operators without `aten.` and `.default`: `conv2d`, `max_pool2d`, `mean.dim`.

<!-- Written by `python -m hyfi_core.lowering.operators_page > docs/operators.md`; the texts are in hyfi_core/rules. -->
"""


def page() -> str:
    """Return the whole page as Markdown."""
    groups: dict[str, list[str]] = defaultdict(list)
    known = {name: rule for name, rule in RULES.items() if name.startswith("aten.")}  # without users' own
    for name, rule in known.items():
        groups[_summary(rule)].append(_short(name))
    rows = [f"| {_code(names)} | {_cell(summary)} |" for summary, names in sorted(groups.items(), key=_by_first_name)]
    others = [f"| {_code([_short(name)])} | {_cell(text)} |" for name, text in sorted(ALTERNATIVES.items())]
    table = ["## With a rule", "", f"{len(known)} operators.", "", "| operators | what they are |", "|---|---|", *rows]
    instead = ["## What to use instead", "", "| operator | use |", "|---|---|", *others]
    return "\n".join([HEAD, *table, "", *instead, ""])


def _summary(rule: Rule) -> str:
    """Return the first paragraph about a rule."""
    text = inspect.getdoc(inspect.unwrap(rule)) or ""
    return text.partition("\n\n")[0].replace("\n", " ").replace("``", "`")


def _short(name: str) -> str:
    return name.removeprefix("aten.").removesuffix(".default")


def _by_first_name(group: tuple[str, list[str]]) -> str:
    return min(name.lstrip("_") for name in group[1])


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names, key=lambda name: name.lstrip("_")))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page(), end="")
