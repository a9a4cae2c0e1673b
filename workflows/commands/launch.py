"""``hyfi launch``: writes, and submits, the script that starts a run or an ingest on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from hyfi_core.errors import RequestError
from workflows.config.load import load_config
from workflows.console import emit_json, say
from workflows.exit_codes import DONE
from workflows.launch.scripts import Resources, Site, script_of, submit
from workflows.paths import require_writable

By = Literal["slurm", "mpiexec", "torchrun"]


def run(
    by: By,
    config: Path,
    overrides: list[str],
    resources: Resources,
    ranks: int | None,
    site: Path | None,
    script: Path | None,
    send: bool,
    as_json: bool,
) -> int:
    """Write the script of a training run.

    Args:
        by: what will start the ranks.
        config: the YAML of the run; checked before anything is written.
        overrides: ``section.key=value``, put over it.
        resources: of the job.
        ranks: processes; None: as many as the run needs (where hosts decide that, it must be given).
        site: ``site.yaml``; None: that of the working directory where there is one.
        script: where to write; None: beside the working directory's other files, under the configuration's name.
        send: submit it.
        as_json: print the script's path and the job's number as one JSON object.

    Returns:
        0.

    Raises:
        RequestError: the configuration or the request is wrong, or Slurm refuses the job.
    """
    settings, cluster = load_config(config, overrides), Site.load(site)
    if ranks is None and settings.roles.by_host:
        raise RequestError("roles by host: how many ranks there are is not known here; give it with --ranks")
    if ranks is not None and not settings.roles.by_host and ranks != settings.ranks:
        raise RequestError(f"--ranks {ranks}: the run needs {settings.ranks} (plan and roles); leave it out")
    count = ranks or settings.ranks
    path = script or Path(f"{config.stem}.{'sbatch' if by == 'slurm' else 'sh'}")
    words = ["train", str(config), *overrides]
    more: dict[str, str] = {}
    if by == "mpiexec":
        more["hosts"] = f" -ppn {-(-count // resources.nodes)}" if resources.nodes > 1 else ""
    if by == "torchrun":
        if count % resources.nodes:
            raise RequestError(f"--nodes {resources.nodes}: torchrun wants as many ranks on each; the run has {count}")
        nodes = resources.nodes
        more["rendezvous"] = ' --rdzv-backend=c10d --rdzv-endpoint="$HEAD_NODE:29400"' if nodes > 1 else " --standalone"
    return _write(path, script_of(by, path, words, count, resources, cluster, **more), send, as_json)


def run_array(
    words: list[str],
    parts: int,
    resources: Resources,
    site: Path | None,
    script: Path | None,
    send: bool,
    as_json: bool,
) -> int:
    """Write the script of an array of jobs, each with its part of an ingest.

    Args:
        words: the command: ``ingest PATH… --out STORE …``.
        parts: jobs of the array.
        resources: of each job.
        site: as in :func:`run`.
        script: as in :func:`run`.
        send: submit it.
        as_json: as in :func:`run`.

    Raises:
        RequestError: the command has no parts, or Slurm refuses the job.
    """
    if not words or words[0] != "ingest":
        given = words[0] if words else "nothing"
        raise RequestError(f"slurm-array: given {given!r}; allowed: ingest PATH… --out STORE (what `--part` divides)")
    if "--part" in words or any(word.startswith("--part=") for word in words):
        raise RequestError("slurm-array: --part is added by the script; leave it out and give --parts")
    if resources.nodes != 1:
        raise RequestError(f"slurm-array: each job of the array has one node; given --nodes {resources.nodes}")
    path = script or Path("ingest.sbatch")
    text = script_of(
        "slurm_array", path, words, 1, resources, Site.load(site), parts=parts, log=f"{path.stem}-%A_%a.log"
    )
    return _write(path, text, send, as_json)


def _write(path: Path, text: str, send: bool, as_json: bool) -> int:
    require_writable(path)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    job = submit(path) if send else None
    slurm = path.suffix == ".sbatch"
    say(f"{path}: submitted as job {job}" if job else f"{path}: start it with {'sbatch' if slurm else 'bash'} {path}")
    if as_json:
        emit_json({"script": path, "job": job})
    return DONE
