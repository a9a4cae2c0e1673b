"""``hyfi launch``: writes, and submits, the script that starts a run, an ingest or a prediction on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hyfi_core.errors import RequestError
from workflows.config.load import load_config
from workflows.console import emit_json, say
from workflows.exit_codes import DONE
from workflows.launch.scripts import Resources, Site, script_of, submit
from workflows.paths import require_writable

By = Literal["slurm", "mpiexec", "torchrun"]


@dataclass(frozen=True)
class ScriptOptions:
    """What every script is asked for with.

    Attributes:
        resources: of the job.
        site: ``site.yaml``; None: that of the working directory where there is one.
        path: where to write the script; None: a name of its own in the working directory.
        submit: whether to submit it.
        as_json: whether to print the script's path and the job's number as one JSON object.
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
    asked: ScriptOptions,
) -> int:
    """Write the script of a training run.

    Args:
        by: what will start the ranks.
        config: the YAML of the run; checked before anything is written.
        overrides: ``section.key=value``, put over it.
        ranks: processes; None: as many as the run needs (where hosts decide that, it must be given).
        asked: of the script; without a path it has the configuration's name, in the working directory.

    Returns:
        0.

    Raises:
        RequestError: the configuration or the request is wrong, or Slurm refuses the job.
    """
    settings, cluster = load_config(config, overrides), Site.load(asked.site)
    if ranks is None and settings.roles.by_host:
        raise RequestError("roles are given by host, so the number of ranks is unknown; give it with --ranks")
    if ranks is not None and not settings.roles.by_host and ranks != settings.ranks:
        raise RequestError(f"--ranks {ranks}: the run needs {settings.ranks} (plan and roles); leave it out")
    count = ranks or settings.ranks
    path = asked.path or Path(f"{config.stem}.{'sbatch' if by == 'slurm' else 'sh'}")
    words = ["train", str(config), *overrides]
    more: dict[str, str] = {}
    if by == "mpiexec":
        more["hosts"] = f" -ppn {-(-count // asked.resources.nodes)}" if asked.resources.nodes > 1 else ""
    if by == "torchrun":
        if count % asked.resources.nodes:
            raise RequestError(
                f"--nodes {asked.resources.nodes}: torchrun needs the same number of ranks on each node; the run has "
                f"{count} ranks"
            )
        nodes = asked.resources.nodes
        more["rendezvous"] = ' --rdzv-backend=c10d --rdzv-endpoint="$HEAD_NODE:29400"' if nodes > 1 else " --standalone"
    return _write(path, script_of(by, path, words, count, asked.resources, cluster, **more), asked)


def run_array(words: list[str], parts: int, asked: ScriptOptions) -> int:
    """Write the script of an array of jobs, each with its part of an ingest or a prediction.

    Args:
        words: the command: ``ingest PATH… --out STORE …`` or ``predict CHECKPOINT SLIDE… --out DIR …``.
        parts: jobs of the array.
        asked: of the script; its resources are those of each job.

    Raises:
        RequestError: the command has no parts, or Slurm refuses the job.
    """
    if not words or words[0] not in ("ingest", "predict"):
        given = words[0] if words else "nothing"
        raise RequestError(
            f"slurm-array: given {given!r}; allowed: ingest PATH… --out STORE, predict CHECKPOINT SLIDE… --out DIR "
            "(the commands that have --part)"
        )
    if "--part" in words or any(word.startswith("--part=") for word in words):
        raise RequestError("slurm-array: --part is added by the script; leave it out and give --parts")
    if asked.resources.nodes != 1:
        raise RequestError(
            f"slurm-array: each job of the array runs on one node; given --nodes {asked.resources.nodes}"
        )
    path = asked.path or Path(f"{words[0]}.sbatch")
    text = script_of(
        "slurm_array", path, words, 1, asked.resources, Site.load(asked.site), parts=parts, log=f"{path.stem}-%A_%a.log"
    )
    return _write(path, text, asked)


def _write(path: Path, text: str, asked: ScriptOptions) -> int:
    require_writable(path)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    job = submit(path) if asked.submit else None
    slurm = path.suffix == ".sbatch"
    say(f"{path}: submitted as job {job}" if job else f"{path}: start it with {'sbatch' if slurm else 'bash'} {path}")
    if asked.as_json:
        emit_json({"script": path, "job": job})
    return DONE
