from __future__ import annotations

import re

from hyfi_core.lowering.operator_table import document
from hyfi_core.rules.table import OPERATORS
from tests.conftest import ROOT


def test_the_page_is_current() -> None:
    again = "run: python -m hyfi_core.lowering.operator_table > docs/operators.md"
    assert (ROOT / "docs" / "operators.md").read_text(encoding="utf-8") == document(), again


def test_every_rule_is_listed_once_and_explained() -> None:
    table = document().partition("## With a rule")[2].partition("## What to use instead")[0]
    rows = [re.split(r"(?<!\\) \| ", row.strip("| ")) for row in table.splitlines() if row.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row[0])]
    known = (text for text, one in OPERATORS.items() if one.rule is not None and text.startswith("aten."))
    assert sorted(names) == sorted(name.removeprefix("aten.").removesuffix(".default") for name in known)
    assert [row for row in rows if len(row) != 4 or not row[1].endswith(".")] == []
