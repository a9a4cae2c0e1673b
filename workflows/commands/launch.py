"""``hyfi launch``: writes (and submits) the script that starts a run, an ingest or a prediction on a cluster."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Literal

from hyfi_core.errors import RequestError
from workflows.config.load import load_config
from workflows.config.run import Config
from workflows.console import emit_json, say, warn
from workflows.exit_codes import DONE
from workflows.launch.scripts import Resources, Site, log_name, script_of
from workflows.launch.submission import submit, why_it_cannot_start
from workflows.paths import require_replaceable

_PARTS = 4
By = Literal["slurm", "local", "mpiexec", "torchrun"]


@dataclass(frozen=True)
class ScriptOptions:
    """Options of all scripts.

    Attributes:
        resources: Resources of the job.
        site: The ``site.yaml``; None: that of the working directory, if there is one.
        path: File of the script; None: a default name in the working directory.
        submit: Whether to submit it.
        as_json: Whether to print the script's path and the job's id as one JSON object.
    """

    resources: Resources
    site: Path | None = None
    path: Path | None = None
    submit: bool = False
    as_json: bool = False


def run(
    by: By,
    config: Path,
    overrides: list[str],
    ranks: int | None,
    options: ScriptOptions,
) -> int:
    """Write the script of a training run.

    Args:
        by: What starts the ranks.
        config: The YAML of the run; checked before anything is written.
        overrides: ``section.key=value``, applied to it.
        ranks: Number of ranks; None: as many as the run needs. Required if roles are given by host name.
        options: Options of the script; its default name is that of the configuration.

    Returns:
        0.

    Raises:
        RequestError: The configuration or the request is not valid, or Slurm refuses the job.
    """
    settings, site, nodes = load_config(config, overrides), Site.load(options.site), options.resources.nodes
    rank_count = _ranks(by, settings, ranks, options.resources)
    path = options.path or Path(f"{config.stem}.{'sbatch' if by == 'slurm' else 'sh'}")
    words = ["train", str(config), *overrides]
    variables: dict[str, str] = {}  # of this launcher's template
    if by == "mpiexec":
        variables["hosts"] = f" -ppn {ceil(rank_count / nodes)}" if nodes > 1 else ""
    if by == "torchrun":
        if rank_count % nodes:
            raise RequestError(
                f"--nodes {nodes}: torchrun needs the same number of ranks on each node; the run has {rank_count} ranks"
            )
        across_nodes = ' --rdzv-backend=c10d --rdzv-endpoint="$HEAD_NODE:29400"'
        variables["rendezvous"] = across_nodes if nodes > 1 else " --standalone"
    how_to_start = f"start it with {'sbatch' if by == 'slurm' else 'bash'} {shlex.quote(str(path))}"
    if by == "torchrun" and nodes > 1:
        how_to_start = (
            f"start it on each of the {nodes} nodes with HEAD_NODE=NODE bash {shlex.quote(str(path))}, where NODE is "
            "the same node's name on all of them"
        )
    text = script_of(by, path, words, rank_count, options.resources, site, **variables)
    return _write(path, text, options, how_to_start)


def _ranks(by: By, settings: Config, ranks: int | None, resources: Resources) -> int:
    """Return the number of ranks that the script starts, not counting those on ``--role-nodes``.

    Raises:
        RequestError: The number is unknown or wrong, or ``--role-nodes`` contradicts the roles.
    """
    if resources.role_nodes:
        if not settings.roles.by_host:
            raise RequestError(
                f"--role-nodes {resources.role_nodes}: roles given by number are spread over all nodes; give them by "
                'host, as in roles.loaders="cpu-*", for ranks on these nodes'
            )
        if ranks is not None:
            raise RequestError(f"--ranks {ranks}: with --role-nodes, give --role-ranks; the plan has the trainers")
        if resources.role_ranks < resources.role_nodes:
            raise RequestError(
                f"--role-nodes {resources.role_nodes}: there are ranks for {resources.role_ranks} at most; give more "
                "with --role-ranks"
            )
        return settings.trainers
    if by == "local" and settings.roles.by_host:
        raise RequestError(
            "roles are given by host, but a local run has one host; give numbers, or use `hyfi launch slurm`"
        )
    if ranks is None and settings.roles.by_host:
        raise RequestError("roles are given by host, so the number of ranks is unknown; give it with --ranks")
    if ranks is not None and not settings.roles.by_host and ranks != settings.ranks:
        raise RequestError(f"--ranks {ranks}: the run needs {settings.ranks} (plan and roles); leave it out")
    return ranks or settings.ranks


def run_array(words: list[str], parts: int | None, options: ScriptOptions) -> int:
    """Write the script of an array of jobs, each with its part of an ingest or a prediction.

    Args:
        words: The command: ``ingest PATH… --out STORE …``, ``predict CHECKPOINT SLIDE… --out DIR …``, or ``train CONFIG
            --folds all``: each job runs a fold.
        parts: Number of jobs in the array; None: four. None for folds, which have a job each.
        options: Options of the script; its resources are those of each job.

    Raises:
        RequestError: The command has no ``--part``, ``parts`` are given for folds, or Slurm refuses the job.
    """
    if words and words[0] == "train":
        if parts is not None:
            raise RequestError(
                f"slurm-array: --parts {parts}: train --folds has a job for each fold; leave --parts out, and choose "
                "folds with --folds 0,1"
            )
        return _run_folds(words, options)
    if not words or words[0] not in ("ingest", "predict"):
        command = words[0] if words else "nothing"
        raise RequestError(
            f"slurm-array: given {command!r}; allowed: ingest PATH… --out STORE, predict CHECKPOINT SLIDE… --out DIR "
            "(the commands that have --part), train CONFIG --folds all"
        )
    if "--part" in words or any(word.startswith("--part=") for word in words):
        raise RequestError("slurm-array: --part is added by the script; leave it out and give --parts")
    parts = _PARTS if parts is None else parts
    about = f"{parts} jobs, each with a part of the slides. Finished slides are skipped"
    return _write_array(words, f"1-{parts}", f'--part "$SLURM_ARRAY_TASK_ID/{parts}"', about, options)


def _run_folds(words: list[str], options: ScriptOptions) -> int:
    """Write the script of an array with a job for each fold of ``train CONFIG --folds …``, and the splits.

    Raises:
        RequestError: There are no folds, or `FoldRuns.check` refuses the runs.
    """
    from workflows.cross_validation.fold_runs import FoldRuns
    from workflows.launch.resumption import Resumption

    arguments, values = _without_options(words[1:], ("--folds", "--fold-column"))
    resumes, arguments = "--resume" in arguments, [word for word in arguments if word != "--resume"]
    if "--folds" not in values or not arguments or any(word.startswith("-") for word in arguments):
        raise RequestError(
            f"slurm-array: given {' '.join(words)!r}; allowed: train CONFIG.yaml [section.key=value] --folds all"
        )
    config, *overrides = arguments
    resumption = Resumption.of(resumes, source=None, accepts_changes=False)
    folds, fold_column = values["--folds"], values.get("--fold-column")
    as_needed = None  # ranks of each run
    runs = FoldRuns(Path(config), tuple(overrides), as_needed, resumption, folds, fold_column)
    runs.check()
    runs.write_splits()  # now, because jobs that start at the same time would each find an incomplete folder
    column = [] if runs.column is None else ["--fold-column", runs.column]
    about = f"A job for each of {len(runs.chosen_folds)} folds; the last one pools all. Finished folds are skipped"
    # --resume: a job that is requeued continues its fold.
    command = ["train", config, *overrides, *column, "--resume"]
    array = ",".join(map(str, runs.chosen_folds))
    return _write_array(command, array, '--folds "$SLURM_ARRAY_TASK_ID"', about, options)


def _without_options(words: list[str], names: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
    """Return (the words without the options ``names`` and their values, these values by option).

    ``["a.yaml", "--folds", "all"]`` gives ``(["a.yaml"], {"--folds": "all"})``. An option whose value is missing stays
    among the words.
    """
    other_words: list[str] = []
    values: dict[str, str] = {}
    # `--folds=all` as `--folds all`; overrides such as `run.steps=9` stay whole.
    words = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while words:
        word = words.pop(0)
        if word in names and words:
            values[word] = words.pop(0)
        else:
            other_words.append(word)
    return other_words, values


def _write_array(words: list[str], array: str, part: str, about: str, options: ScriptOptions) -> int:
    """Write the script of a Slurm array, whose jobs have one rank each.

    Args:
        words: Arguments of ``hyfi``, the same in each job.
        array: Numbers of the jobs, as ``sbatch --array`` takes them.
        part: The option that each job adds to the command, as ``--folds "$SLURM_ARRAY_TASK_ID"``.
        about: What the jobs do, for a comment of the script.
        options: The script's options.
    """
    if options.resources.nodes != 1:
        raise RequestError(
            f"slurm-array: each job of the array runs on one node; given --nodes {options.resources.nodes}"
        )
    path = options.path or Path(f"{words[0]}.sbatch")
    variables = {"array": array, "part": part, "about": about, "log": log_name(path, "%A_%a")}
    text = script_of("slurm_array", path, words, 1, options.resources, Site.load(options.site), **variables)
    return _write(path, text, options, f"start it with sbatch {shlex.quote(str(path))}")


def _write(path: Path, text: str, options: ScriptOptions, how_to_start: str) -> int:
    """Write the script, and submit it if requested; return the exit code."""
    require_replaceable(path, lambda start: start.startswith(b"#!"), "a script")
    # Kept, to undo the write if Slurm refuses the job.
    before = path.read_bytes() if path.exists() else None
    path.write_text(text, encoding="utf-8")
    mode = path.stat().st_mode
    path.chmod(mode | (mode & 0o444) >> 2)  # as chmod +x: whoever may read it may run it
    job = _submitted(path, before) if options.submit else None
    say(f"{path}: submitted as job {job}" if job else f"{path}: {how_to_start}")
    reason = why_it_cannot_start(job) if job else None
    if reason is not None:
        warn(f"hyfi: job {job} does not start as it is: {reason}; `scancel {job}` removes it")
    if options.as_json:
        emit_json({"script": path, "job": job})
    return DONE


def _submitted(path: Path, before: bytes | None) -> str:
    """Submit a script; if that is refused, leave the file as it was ``before``."""
    try:
        return submit(path)
    except RequestError:
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)
        raise
