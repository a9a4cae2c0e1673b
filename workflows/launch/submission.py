"""Submission of a script to Slurm, and Slurm's reasons why a job does not start."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from hyfi_core.errors import RequestError

_NEVER = {
    "PartitionNodeLimit": "the partition does not allow so many nodes",
    "PartitionTimeLimit": "the partition does not allow so much time",
    "PartitionConfig": "the partition does not have so many nodes, cores or so much memory",
    "BadConstraints": "no node has what is asked for",
    "AccountNotAllowed": "the partition does not allow this account",
    "InvalidAccount": "there is no such account",
    "InvalidQOS": "there is no such quality of service",
    "QOSNotAllowed": "the partition does not allow this quality of service",
}
"""Slurm's reasons that keep a job waiting until somebody changes the job or the cluster."""
_SUBMISSION_S = 120
"""Longest submission. A controller that does not answer makes ``sbatch`` try again for a minute or more."""


def submit(path: Path) -> str:
    """Submit a script to Slurm and return the job's id.

    Raises:
        RequestError: There is no ``sbatch``, or it refuses the job, or does not answer.
    """
    if shutil.which("sbatch") is None:
        raise RequestError(
            "--submit: sbatch not found; without --submit the script is written, to be submitted on a login node"
        )
    command = ["sbatch", "--parsable", str(path)]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=_SUBMISSION_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise RequestError(
            f"--submit: sbatch has not answered within {_SUBMISSION_S} s; see with `squeue --me` whether the job is "
            "there before submitting it again"
        ) from error
    if completed.returncode != 0:
        # Slurm names its program in front of each line; the message does so once.
        lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in completed.stderr.splitlines()]
        raise RequestError(f"--submit: sbatch refused {path}: {'; '.join(lines)}{_partitions_text(completed.stderr)}")
    # --parsable prints `id`, or `id;cluster`.
    return completed.stdout.strip().partition(";")[0]


def why_it_cannot_start(job: str) -> str | None:
    """Return why a submitted job will not start as it is; None if it waits for resources, or Slurm gives no reason."""
    for reason in _output_lines("squeue", "--noheader", f"--jobs={job}", "--format=%r"):
        if reason in _NEVER:
            return f"{_NEVER[reason]} (Slurm's reason: {reason})"
    return None


def _partitions_text(refusal: str) -> str:
    """Return a sentence with the partitions of the cluster if a refusal is about them, else nothing."""
    names = list(dict.fromkeys(_output_lines("sinfo", "--noheader", "--format=%R"))) if "partition" in refusal else []
    return f"; the partitions are {', '.join(names)}" if names else ""


def _output_lines(*words: str) -> list[str]:
    """Return the lines that a command of Slurm prints; none if it fails."""
    try:
        completed = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in completed.stdout.splitlines() if line.strip()] if completed.returncode == 0 else []
