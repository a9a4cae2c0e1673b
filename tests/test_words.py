"""The words of the code: names say what a thing is, an alias has one home, a term of the glossary one meaning."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("hyfi_core", "data", "pathology", "workflows")

# Names that leave to the reader what they are; compounds such as ``kept_bytes`` are nouns and do not count.
VAGUE = frozenset(
    [
        "found",
        "one",
        "given",
        "known",
        "made",
        "held",
        "wanted",
        "needed",
        "place",
        "thing",
        "seen",
        "taken",
        "kept",
        "said",
        "told",
        "asked",
        "done",
        "what",
        "which",
        "whole",
        "rest",
        "other",
        "others",
        "new",
        "old",
        "both",
        "all",
        "here",
        "there",
        "now",
        "then",
        "so",
    ]
)
# A few stay: ``other`` of an operation on two boxes, ``new`` beside ``old``.
MOST_VAGUE = 0.015


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def assigned_names(tree: ast.AST) -> Iterator[str]:
    """Yield the name of each assignment: locals, loop variables, arguments, attributes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            yield node.arg
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or (
            isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name
        ):
            yield node.name


def vague_share(paths: list[Path]) -> tuple[float, Counter[str]]:
    """Return which part of all assigned names is vague, and those names."""
    names = Counter(name.lstrip("_") for path in paths for name in assigned_names(parsed(path)))
    vague = Counter({name: count for name, count in names.items() if name in VAGUE})
    return vague.total() / max(1, names.total()), vague


@pytest.mark.parametrize("package", PACKAGES)
def test_names_say_what_they_are(package: str) -> None:
    share, vague = vague_share(sources(package))
    assert share <= MOST_VAGUE, f"{share:.2%} of the names of {package} are vague: {vague}"


def test_vague_names_are_seen(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        "def _found(given, kept_bytes):\n    self.known = [one for one in given]\n    return held, place\n"
    )
    share, vague = vague_share([wrong])
    assert vague == Counter(["found", "given", "known", "one"]) and share == 4 / 5


def documented_arguments(text: str) -> list[str]:
    """Return the names in the section ``Args`` of a docstring."""
    _, _, section = text.partition("\nArgs:\n")
    lines = re.split(r"\n\S", section)[0].splitlines()
    matches = (re.match(r" {4}(\w+)(?: \(.*?\))?:", line) for line in lines)
    return [match[1] for match in matches if match]


def unknown_arguments(path: Path) -> list[str]:
    """Return the arguments that docstrings of a module describe, but functions do not have."""
    unknown = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            inits = [each for each in ast.iter_child_nodes(node) if getattr(each, "name", "") == "__init__"]
            if isinstance(node, ast.ClassDef) and not inits:  # a dataclass, or a class that inherits it
                continue
            function = (inits or [node])[0]
            names = {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
            unknown += [
                f"{path.name}:{node.lineno}: {name}"
                for name in documented_arguments(ast.get_docstring(node) or "")
                if name not in names
            ]
    return unknown


def test_docstrings_describe_arguments_that_exist() -> None:
    assert [text for package in PACKAGES for path in sources(package) for text in unknown_arguments(path)] == []


def test_the_argument_of_another_name_is_seen(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    text = '"""Do.\n\n{0}Args:\n{0}    a: first.\n{0}    old (int): second,\n{0}        and: more.\n{0}"""'
    wrong.write_text(
        f"class C:\n    {text.format('    ')}\n    def __init__(self, a): ...\n"
        f"def f(a, old):\n    {text.format('    ')}\ndef g(a, new):\n    {text.format('    ')}\n"
    )
    assert unknown_arguments(wrong) == ["wrong.py:1: old", "wrong.py:18: old"]


def aliases(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (name, line) of each alias of a type at the top of a module; options of commands are no types."""
    for node in parsed(path).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id.lstrip("_")
            if name[:1].isupper() and not name.isupper() and _is_type(node.value):
                yield name, node.lineno


def _is_type(value: ast.expr) -> bool:
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.BitOr):
        return _is_type(value.left) and _is_type(value.right)
    if isinstance(value, ast.Subscript):
        return ast.unparse(value.value) != "Annotated"
    return isinstance(value, (ast.Name, ast.Attribute)) or (isinstance(value, ast.Constant) and value.value is None)


def repeated_aliases(paths: list[Path]) -> dict[str, list[str]]:
    """Return aliases that several modules define, with the places."""
    places = defaultdict(list)
    for path in paths:
        for name, line in aliases(path):
            places[name].append(f"{path.name}:{line}")
    return {name: where for name, where in places.items() if len(where) > 1}


def test_an_alias_has_one_home() -> None:
    assert repeated_aliases([path for package in PACKAGES for path in sources(package)]) == {}


def test_a_repeated_alias_is_seen(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text("Mask = NDArray[np.bool_]\n_Pair = tuple[int, int] | None\nSIZE = data[0]\n")
    found = repeated_aliases([tmp_path / "a.py", tmp_path / "b.py"])
    assert found == {"Mask": ["a.py:1", "b.py:1"], "Pair": ["a.py:2", "b.py:2"]}


# Terms of the glossary that other things are easily called by, and where files, classes and functions have them.
_TERMS = {
    "recipes?": ("workflows/benchmarks",),
    "compil(e|es|ed|er|ing)": (
        *("hyfi_core/lowering/compiling", "hyfi_core/runtime/parallelize.py"),
        *("workflows/gpu_check", "workflows/launch/compile_cache.py", "workflows/training"),
    ),
    # Schedule-free optimizers are called so by their paper.
    "schedules?": (
        *("hyfi_core/schedule", "hyfi_core/cost", "hyfi_core/runtime", "workflows/config"),
        "workflows/finetuning/optimizers/schedule_free.py",
    ),
    "plan(s|ned|ner|ning)?": ("hyfi_core", "workflows"),
    # Of plans in the core; of heatmaps and of tissue where these are drawn. AmoebaNet's are called so by its paper.
    "cells?": (
        *("hyfi_core/cells", "hyfi_core/cost", "hyfi_core/plan", "hyfi_core/runtime", "hyfi_core/models/amoebanet.py"),
        *("data/loading", "data/tiles", "pathology", "workflows"),
    ),
    # Of batches; ``turn_s`` is a key of a machine's YAML.
    "turns?": ("data", "workflows/training", "workflows/benchmarks", "workflows/commands/bench", "hyfi_core/cost"),
    # Of memory in the core, of TIFF in readers, of HTML elsewhere.
    "pages?|paged|pager|paging": ("hyfi_core/cells", "hyfi_core/runtime/calls", "pathology", "workflows"),
}
_WORD_OF_A_NAME = re.compile(r"[a-z]+|[A-Z][a-z]*|[A-Z]+(?![a-z])")


def named_with(term: str, path: Path) -> list[str]:
    """Return the names of a file, and of its classes and functions, that have a term as one of their words."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    names = [path.stem, *(node.name for node in ast.walk(parsed(path)) if isinstance(node, kinds))]
    words = {name: [word.lower() for word in _WORD_OF_A_NAME.findall(name)] for name in names}
    return [name for name, parts in words.items() if any(re.fullmatch(term, part) for part in parts)]


@pytest.mark.parametrize("term", _TERMS)
def test_a_term_of_the_glossary_has_one_meaning(term: str) -> None:
    paths = [path for package in PACKAGES for path in sources(package)]
    homes = [ROOT / place for place in _TERMS[term]]
    outside = [path for path in paths if not any(path == home or home in path.parents for home in homes)]
    assert {str(path.relative_to(ROOT)): names for path in outside if (names := named_with(term, path))} == {}


def test_a_term_in_another_meaning_is_seen(tmp_path: Path) -> None:
    wrong = tmp_path / "meal_plan.py"
    wrong.write_text("class PlanOfMeals:\n    def replan(self): ...\n    def _plans(self): ...\n")
    assert named_with("plans?", wrong) == ["meal_plan", "PlanOfMeals", "_plans"]


_REFERENCE = re.compile(r"`((?:hyfi_core|data|pathology|workflows)(?:\.\w+){2,})`")


def names_in(body: list[ast.stmt]) -> set[str]:
    """Return the names that statements of a module or class define or import."""
    names = set()
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            names |= names_in(node.body)
        else:
            names |= {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names


def refers_to_something(reference: str) -> bool:
    """Whether ``package.module.Name`` or ``package.module.Class.member`` is defined; nothing is imported."""
    parts = reference.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.is_file():
            body: list[ast.stmt] = parsed(file).body
            for name in parts[length:]:
                if name not in names_in(body):
                    return False
                body = next((node.body for node in body if isinstance(node, ast.ClassDef) and node.name == name), [])
            return True
    return False


def dangling_references(paths: list[Path]) -> list[str]:
    """Return names in backticks, in comments and docstrings, that no longer exist where they are said to be."""
    return [
        f"{path.name}:{number}: {match[1]}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        for match in _REFERENCE.finditer(line)
        if not refers_to_something(match[1])
    ]


def test_names_in_docstrings_exist() -> None:
    assert dangling_references([path for package in PACKAGES for path in sources(package)]) == []


def test_a_name_that_moved_is_seen(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text(
        '"""`data.files.sha256_of`, `data.store.codec.PixelCodec.parse` and `pathology.readers.facts`, but neither '
        '`data.files.sha1_of` nor `data.store.codec.PixelCodec.guess` nor `data.no_module.Name`."""\n'
    )
    assert [text.rpartition(" ")[2] for text in dangling_references([wrong])] == [
        "data.files.sha1_of",
        "data.store.codec.PixelCodec.guess",
        "data.no_module.Name",
    ]


def test_a_square_of_a_heatmap_is_no_cell() -> None:
    """A cell is a piece that is computed in turn; where nothing is computed, the word says something else."""
    predict, view = ROOT / "pathology" / "predict", ROOT / "pathology" / "view"
    names = ("heatmap", "heatmap_tiff", "overlay", "regions", "report", "results", "slide_report", "slide_result")
    drawn = [*(predict / f"{name}.py" for name in names), *view.rglob("*.py"), *(view / "templates").glob("*")]
    for path in (*drawn, *(predict / "tiles").glob("*.py"), ROOT / "pathology" / "templates" / "report.html"):
        # Keys of files that exist.
        text = re.sub(r'"(cell_to_level0|cell_px|cells_mapped)"', "", path.read_text(encoding="utf-8"))
        assert not re.search(r"cells?\b|cell_|_cell", text, re.IGNORECASE), path
