"""The YAML of a run: reading, overrides, validation, error messages, writing."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from hyfi_core.errors import RequestError
from workflows.config.run import Config
from workflows.config.section import element_section_of, section_of

__all__ = [
    "MAY_CHANGE_ON_RESUME",
    "Config",
    "changed_keys",
    "dump_resolved",
    "load_config",
    "refuse_changes",
    "settings_of",
]

# These keys do not affect the result of a step, with one exception: they may change over which images batch norm
# computes its statistics, and the run then warns (`workflows.training.checks.norm_batches`). Checkpoints do not depend
# on plan and roles. Keys of the model, data, seed, precision and optimizer affect results: other values, another run.
MAY_CHANGE_ON_RESUME = frozenset(
    {
        "optimizer.decay_norms",  # `SavedRun.check_groups` refuses it if it changes the optimizer's groups
        "run.dir",
        "run.epochs",
        "run.steps",
        "run.threads",
        "run.memory_format",
        "run.compile",
        "run.compile_cache",
        "run.cuda_graphs",
        "run.deterministic",
        "run.checkpoint_every_steps",
        "run.keep",
        "run.loggers",
        "run.on_nonfinite",
        "run.stall_s",
        "run.tensorboard",
        "run.trace",
        "run.machine",
        "run.device",
        "run.early_stop",
        "model.encoder.keep_bytes",
        "plan.grids",
        "plan.cuts",
        "plan.interleave",
        "plan.memory_bytes",
        "plan.microbatches",
        "plan.mirror",
        "plan.recompute",
        "plan.replicas",
        "plan.schedule",
        "plan.sync_batch_norm",
        "plan.fused_halo",
        "plan.tiles",
        "plan.gather_bytes",
        "plan.branches",
        "plan.cells",
        "plan.spill",
        "roles.loaders",
        "roles.validators",
        "roles.design",
        "roles.spare",
        "roles.shares",
        "validation.every_steps",
        "validation.policy",
        "validation.grids",
        "validation.cells",
        "data.merge_alike",
        "data.missing",  # `SavedRun` refuses it if it changes the classes
        "data.prefetch",
        "data.workers",
        "data.cache_bytes",
        "data.node_cache",
        "data.node_cache_bytes",
    }
)


AUTO_PLAN = "auto"
"""Value of ``plan`` with which the best plan is chosen at start."""


class _StrictLoader(yaml.SafeLoader):
    """Loads YAML without tags, and refuses duplicate keys (PyYAML silently keeps the last)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Return a mapping; refuse one in which a key occurs twice."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            # A sequence is no key: `super` refuses it, where a set would raise TypeError.
            if not isinstance(key, Hashable):
                continue
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} occurs twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_config(path: Path, overrides: Sequence[str] = (), ignore_plan: bool = False) -> Config:
    """Read a run's YAML and apply overrides.

    Relative paths in it are relative to the working directory, as on a command line.

    Args:
        path: The YAML file.
        overrides: ``section.key=value``, applied in order.
        ignore_plan: Whether ``plan: auto`` is read as the default plan; otherwise it is refused.

    Raises:
        RequestError: The file does not exist or is not YAML, a key is unknown, or a value is not allowed. The message
            names every such key, what was given and what is allowed.
    """
    tree = _read_with_overrides(path, overrides)
    if tree.get("plan") == AUTO_PLAN and ignore_plan:
        tree["plan"] = {}
    elif tree.get("plan") == AUTO_PLAN:
        raise RequestError(
            f"{path}: plan: auto works only if `hyfi train` starts the ranks itself; otherwise write the plan first: "
            f"hyfi plan {path} --ranks N --write"
        )
    return _check(tree, str(path))


def asks_for_plan(path: Path, overrides: Sequence[str] = ()) -> bool:
    """Return whether the run's plan is ``auto``, to be chosen at start.

    Raises:
        RequestError: The file does not exist or is not YAML.
    """
    return bool(_read_with_overrides(path, overrides).get("plan") == AUTO_PLAN)


def _read_with_overrides(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the tree of a YAML file with the overrides in it; nothing is checked yet."""
    tree = _read(path)
    for override in overrides:
        _override(tree, override)
    return tree


def dump_resolved(config: Config) -> str:
    """Return YAML with all keys that have a meaning, defaults included; ``load_config`` reads it as ``config``."""
    tree = config.model_dump(mode="json")
    for section, _, key in (name.partition(".") for name in config.meaningless):
        # Keys without a meaning for this kind of run, which loading would refuse.
        del tree[section][key]
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, default_flow_style=None)


def settings_of(config: Config) -> dict[str, Any]:
    """Return section.key -> value of every setting."""
    return dict(_leaves(config.model_dump(mode="json")))


def changed_keys(before: Config, now: Config) -> dict[str, tuple[Any, Any]]:
    """Return {section.key: (value before, value now)} for all keys that differ."""
    old, new = settings_of(before), settings_of(now)
    return {key: (old.get(key), new.get(key)) for key in sorted(old | new) if old.get(key) != new.get(key)}


def refuse_changes(before: Config, now: Config) -> None:
    """Check that a run with the configuration ``before`` may be continued with ``now``.

    Raises:
        RequestError: A key differs that affects the result of a step.
    """
    changed = {key: pair for key, pair in changed_keys(before, now).items() if key not in MAY_CHANGE_ON_RESUME}
    if changed:
        lines = [f"  {key}: the run has {old!r}, given now {new!r}" for key, (old, new) in changed.items()]
        raise RequestError(
            "a run cannot continue with different settings:\n"
            + "\n".join(lines)
            + "\nUse the old values, or another run.dir. These may change: "
            + ", ".join(sorted(MAY_CHANGE_ON_RESUME - {"run.dir"}))
        )


def _read(path: Path) -> dict[str, Any]:
    """Return the tree of a YAML file."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=_StrictLoader)
    except FileNotFoundError:
        raise RequestError(f"{path}: no such file; give the YAML file of a run (see workflows/recipes)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot be read as text: {error}") from None
    except yaml.YAMLError as error:
        raise RequestError(f"{path}: not YAML: {error}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise RequestError(f"{path}: given {type(tree).__name__}; allowed: sections ({', '.join(_names(Config))})")
    # `data:` with nothing below is an empty section.
    return {key: {} if value is None else value for key, value in tree.items()}


def _override(tree: dict[str, Any], override: str) -> None:
    """Set the key of an override ``section.key=value``, or of ``plan=auto``, in the tree."""
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    # The only section that may be a word; it replaces the plan of the file.
    if names == ["plan"] and text.strip() == AUTO_PLAN:
        tree["plan"] = AUTO_PLAN
        return
    if not equals or len(names) < 2 or not all(names):
        raise RequestError(f"override {override!r}: section, key or '=' is missing; allowed: section.key=value")
    # Bytes of the command line that Python could not decode (surrogateescape); YAML's own message would not name them.
    if any("\udc80" <= letter <= "\udcff" for letter in text):
        raise RequestError(
            f"override {override!r}: it has bytes that are not {sys.getfilesystemencoding()}; in a UTF-8 locale "
            "(LC_ALL=C.UTF-8) use names that are UTF-8, for example a link to the folder"
        )
    try:
        value = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError:
        raise RequestError(
            f"override {override!r}: {text!r} is not a YAML value; quote it, as in key='\"…\"'"
        ) from None
    section: Any = tree
    for name in names[:-1]:
        # An override may give a key of a section that the file lacks, or has as null.
        if not isinstance(section.get(name), dict):
            section[name] = {}
        section = section[name]
    section[names[-1]] = value


def _check(tree: Mapping[str, Any], source: str) -> Config:
    """Return the configuration of a tree; ``source`` names it in messages."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines_by_key: dict[tuple[str, ...], str] = {}
        for fault in error.errors():
            _, names = _locate(fault["loc"])
            # A union of types gives one fault for each type: keep the last for each key.
            lines_by_key[tuple(names)] = _describe(fault, tree)
    lines = "\n".join(f"  {line}" for line in lines_by_key.values())
    raise RequestError(f"{source}: {len(lines_by_key)} wrong setting{'s' if len(lines_by_key) > 1 else ''}\n{lines}")


def _describe(fault: Any, tree: Mapping[str, Any]) -> str:
    """Return one line on a fault of pydantic's `ValidationError.errors`: the key, what was given, what is allowed."""
    model, names = _locate(fault["loc"])
    key = ".".join(names)
    if fault["type"] == "extra_forbidden":
        near = difflib.get_close_matches(names[-1], _names(model), n=1, cutoff=0.5)
        hint = f"; did you mean {'.'.join([*names[:-1], near[0]])}? Allowed" if near else "; allowed"
        where = f"in {'.'.join(names[:-1])}" if len(names) > 1 else "sections"
        return f"{key}: unknown (given: {_given(tree, names)!r}){hint} {where}: {', '.join(_names(model))}"
    if fault["type"] == "value_error":
        reason = str(fault["ctx"]["error"])
        return f"{key}: {reason}" if key else reason
    allowed = _allowed(model, names)
    if fault["type"] == "missing":
        return f"{key}: missing; needed: {allowed}"
    return f"{key}: given {_given(tree, names)!r}; allowed: {allowed}"


def _given(tree: Any, names: Sequence[str]) -> Any:
    """Return the value at a path of keys; None if there is none."""
    for name in names:
        if isinstance(tree, list):
            tree = tree[int(name)]
            continue
        tree = tree.get(name) if isinstance(tree, Mapping) else None
    return tree


def _locate(loc: Sequence[int | str]) -> tuple[type[BaseModel], list[str]]:
    """Return (section, keys) of the faulty key at pydantic's error location ``loc``, without indices inside its value.

    ``("optimizer", "betas", 0)`` gives ``(OptimizerConfig, ["optimizer", "betas"])``.
    """
    model: type[BaseModel] = Config
    names: list[str] = []
    for name in loc:
        names.append(str(name))
        if isinstance(name, int):  # of a list of sections, whose keys follow
            continue
        inner = _section(model, name)
        if inner is None:  # a plain value: what follows in `loc` are indices and types inside it
            break
        # The last key of a fault is a key of the section around it, also if it is a section itself.
        if name is not loc[-1]:
            model = inner
    return model, names


def _section(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    field = model.model_fields.get(name)
    return None if field is None else section_of(field) or element_section_of(field)


def _allowed(model: type[BaseModel], names: Sequence[str]) -> str:
    """Return what may be given for the key ``names`` in the section ``model``, for messages."""
    field = model.model_fields.get(names[-1])
    if field is not None and field.description:
        return field.description
    inner = _section(model, names[-1])
    return f"a section with the keys {', '.join(_names(inner))}" if inner else f"one of {', '.join(_names(model))}"


def _names(model: type[BaseModel]) -> list[str]:
    return list(model.model_fields)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (section.key, value) of all keys; lists and ``options`` are one value."""
    for name, value in tree.items():
        # `options` belong to the user's class: they change as a whole.
        if isinstance(value, Mapping) and name != "options":
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
