"""Modules of the user that a configuration names: what is said if they cannot be imported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hyfi_core import RequestError
from hyfi_core.user_code import load_user_code


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("fails_zero", "import json\n1 / 0\n", r"fails_zero\.py, line 2 \(1 / 0\): ZeroDivisionError: division by"),
        (
            "fails_inside",
            "import json\n\njson.loads('{')\n",
            r"fails_inside\.py, line 3 \(json.*\): JSONDecodeError: Exp",
        ),
        ("fails_syntax", "x = 1\nif x\n", r"fails_syntax\.py, line 2: SyntaxError: expected ':'"),
        (
            "fails_attribute",
            "import json\njson.read('x')\n",
            r"_attribute\.py, line 2 .*: AttributeError: module 'json' ",
        ),
        ("fails_exit", "import sys\nsys.exit(2)\n", r"fails_exit\.py, line 2 \(sys.exit\(2\)\): it ends the program"),
        ("fails_import", "\nfrom json import none\n", r"fails_import\.py, line 2 .*: ImportError: cannot import name"),
    ],
)
def test_a_module_that_fails_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, said: str
) -> None:
    """It was a traceback and code 70, as of a fault in hyfi; a module that ends the program ended it with its code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / f"{name}.py").write_text(text)
    with pytest.raises(RequestError, match=rf"^model\.name '{name}:make': importing {name} failed in .*{said}"):
        load_user_code("model.name", f"{name}:make", "a function that makes a model")
