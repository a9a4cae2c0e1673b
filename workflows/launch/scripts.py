"""Scripts that start a run, an ingest or a prediction on a cluster, from templates.

Settings of a cluster (account, modules, container, MPI) are in one ``site.yaml``. The templates are in
``workflows/launch/templates``; ``site.yaml`` may name a folder with modified ones.
"""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hyfi_core.errors import RequestError

SIGNAL_S = 120
"""Seconds before the time limit at which a run saves and stops: enough for one step and a checkpoint."""
SIGNAL_EARLY_S = 60
"""Slurm may send the signal before the time limit this many seconds earlier than asked."""
_NAMES_OF_SLURM = ("partition", "account", "role_partition")
_MOST_OF_LIMIT = 0.25
"""Fraction of a short time limit; a run saves and stops at most this long before it."""


@dataclass(frozen=True)
class Site:
    """Settings of a cluster.

    Attributes:
        partition, account: Slurm partition and account.
        mpi: Value of ``srun --mpi``; None: chosen for the MPI of this machine.
        modules: Environment modules to load first.
        setup: Shell lines to run after that (activate an environment, set a proxy).
        program: Command that starts ``hyfi`` (``apptainer exec hyfi.sif hyfi``); None: this Python's.
        srun: Additional arguments of ``srun`` (``--cpu-bind=cores``).
        sbatch: Additional ``#SBATCH`` options, without that word.
        role_partition: Partition of the nodes of roles (``--role-nodes``); None: the default one of Slurm.
        role_sbatch: Additional ``#SBATCH`` options of these nodes (``--constraint=dpu``), without that word.
        scratch: Folder on a disk of each node, made by Slurm jobs for temporary files and the node's cache of images;
            may use the job's variables (``/scratch/$SLURM_JOB_ID``). None: the system's temporary folder.
        signal_s: Seconds before the time limit at which a run saves and stops; at most a quarter of the limit.
        templates: Folder with modified templates; others are the built-in ones.
    """

    partition: str | None = None
    account: str | None = None
    mpi: str | None = None
    modules: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    program: str | None = None
    srun: str = ""
    sbatch: list[str] = field(default_factory=list)
    role_partition: str | None = None
    role_sbatch: list[str] = field(default_factory=list)
    scratch: str | None = None
    signal_s: int = SIGNAL_S
    templates: str | None = None

    @classmethod
    def load(cls, path: Path | None) -> Site:
        """Read ``site.yaml``: the given one, or that of the working directory if it exists.

        Raises:
            RequestError: It is missing, not YAML, or has an unknown key or a value of the wrong type.
        """
        if path is None:
            path = Path("site.yaml")
            # The default file may be missing; a given one may not.
            if not path.exists():
                return cls()
        try:
            document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise RequestError(f"{path}: cannot be read as YAML: {error}") from None
        if not isinstance(document, dict):
            raise RequestError(
                f"{path}: given {type(document).__name__}; allowed: a mapping with the keys {', '.join(_keys(cls))}"
            )
        for key, value in document.items():
            default = getattr(cls(), str(key), None)
            # Fields whose default is None are text.
            expected_type = str if default is None else type(default)
            # A bool is an int to isinstance.
            is_typed = isinstance(value, expected_type) and not isinstance(value, bool)
            if key not in _keys(cls) or not is_typed or (expected_type is int and value < 1):
                raise RequestError(
                    f"{path}: {key}: given {value!r}; allowed: {', '.join(_keys(cls))} "
                    "(modules, setup, sbatch and role_sbatch are lists, signal_s is a number from 1, the others text)"
                )
        return cls(**document)


@dataclass(frozen=True)
class Resources:
    """Resources of a job.

    Attributes:
        nodes: Number of nodes.
        gpus_per_node, cpus_per_task: GPUs of each node, and cores of each rank; None: not requested.
        time: Time limit in Slurm's format; None: the partition's.
        partition: Slurm partition; None: the site's.
        mpi: Value of ``srun --mpi``; None: the site's.
        role_nodes: Further nodes of a heterogeneous Slurm job, whose ranks have the roles that the run gives to their
            hosts; 0: none.
        role_ranks: Number of ranks on these nodes.
        role_partition: Partition of these nodes; None: the site's.
    """

    nodes: int = 1
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    time: str | None = None
    partition: str | None = None
    mpi: str | None = None
    role_nodes: int = 0
    role_ranks: int = 0
    role_partition: str | None = None


def script_of(
    template: str, path: Path, words: list[str], ranks: int, resources: Resources, site: Site, **more: Any
) -> str:
    """Return the text of a script.

    Args:
        template: ``slurm``, ``slurm_array``, ``local``, ``mpiexec`` or ``torchrun``.
        path: File of the script.
        words: Arguments of ``hyfi``.
        ranks: Number of ranks, without those on the nodes of roles.
        resources: Resources of the job.
        site: Settings of the cluster.
        more: Additional variables of the template.

    Raises:
        RequestError: There are more nodes than ranks, the time limit is wrong or too short, the script's name cannot
            stand in a script, or the template cannot be rendered.
    """
    if resources.nodes > ranks:
        raise RequestError(f"--nodes {resources.nodes}: the run has ranks for {ranks} at most; give fewer nodes")
    requested = {key: value for key, value in asdict(resources).items() if value is not None}
    values: dict[str, Any] = {"gpus_per_node": None, "cpus_per_task": None, "time": None, **asdict(site), **requested}
    values |= {key: shlex.quote(values[key]) for key in _NAMES_OF_SLURM if values[key] is not None}
    values |= {
        "signal_s": _signal_s(resources, site),
        "script": shlex.quote(path.name),
        "name": shlex.quote(path.stem),
        # Slurm starts the script in the folder of `sbatch`; relative paths of the command belong to this one.
        "folder": shlex.quote(str(Path.cwd())),
        "log": log_name(path, "%j"),
        "command": shlex.join(words),
        "ranks": ranks,
        "per_node": math.ceil(ranks / resources.nodes),
        # -P: without it, a folder `workflows` in the working directory would be imported instead.
        "program": site.program or f"{shlex.quote(sys.executable)} -P -m workflows",
        "srun": f" {site.srun}" if site.srun else "",
        "mpi": resources.mpi or site.mpi or _pmi_of_this_mpi(),
        "cores": f" --cpus-per-task={resources.cpus_per_task} --cpu-bind=cores" if resources.cpus_per_task else "",
        "groups": " --het-group=0,1" if resources.role_nodes else "",
        "role_per_node": math.ceil(resources.role_ranks / max(1, resources.role_nodes)),
    }
    return _render(template, site, {**values, **more})


def log_name(path: Path, job: str) -> str:
    """Return the name of a job's log as it stands in the script ``path``; ``job``: Slurm's pattern of its number.

    Raises:
        RequestError: The script's name has characters that a script cannot quote.
    """
    # A backslash in the name of a log makes Slurm leave its patterns as they are.
    if not path.name.isprintable() or "\\" in path.name:
        raise RequestError(f"--script {str(path)!r}: give a name without control characters and backslashes")
    # Slurm would read a `%` of the script's name as one of its patterns.
    name, folder = f"{path.stem.replace('%', '_')}-{job}.log", str(Path.cwd())
    # Slurm puts the folder of `sbatch` before a name alone, and would read a `%` there as a pattern: the job fails.
    if "%" in folder and "\\" not in folder and folder.isprintable():
        name = f"{folder.replace('%', '%%')}/{name}"
    return shlex.quote(name)


def _signal_s(resources: Resources, site: Site) -> int:
    """Return the seconds before the time limit at which a job is asked to stop: at most a quarter of the limit.

    Raises:
        RequestError: The limit is not in Slurm's format, or a job would be asked to stop as soon as it starts.
    """
    if resources.time is None:
        return site.signal_s
    limit_s = _seconds_of(resources.time)
    if limit_s is None:
        raise RequestError(
            f"--time {resources.time}: not a time limit; give HH:MM:SS, DAYS-HH:MM:SS, or a number of minutes"
        )
    # A short job would otherwise be asked to stop before it has done anything.
    signal_s = int(min(site.signal_s, _MOST_OF_LIMIT * limit_s))
    if limit_s <= signal_s + SIGNAL_EARLY_S:
        raise RequestError(
            f"--time {resources.time}: Slurm tells the job to save and stop before the limit, up to {SIGNAL_EARLY_S} s "
            f"earlier than requested: give two minutes at least"
        )
    return signal_s


def _seconds_of(time: str) -> float | None:
    """Return a time limit of Slurm in seconds, infinity without a limit; None if the text is no time limit."""
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        return None
    days, *clock = match.groups()
    numbers = [int(number) for number in clock if number is not None]
    if days is not None:  # days-hours, days-hours:minutes, days-hours:minutes:seconds
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:  # minutes, minutes:seconds
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    # To Slurm, 0 means no limit, too.
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60.0 + seconds or math.inf


def _pmi_of_this_mpi() -> str:
    """Return the value of ``srun --mpi`` for the MPI of this machine: PMIx for Open MPI, PMI-2 for others."""
    from workflows.launch import mpiexec

    try:
        return "pmix" if mpiexec.find_mpiexec().flavour == "Open MPI" else "pmi2"
    except RequestError:
        return "pmi2"


def _render(template: str, site: Site, values: Mapping[str, Any]) -> str:
    """Return a script from its template, the site's own one first."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, TemplateError

    folders = [*([site.templates] if site.templates else []), str(Path(__file__).parent / "templates")]
    environment = Environment(
        loader=FileSystemLoader(folders),
        # A mistyped variable of a modified template is refused, not left out of the script.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Shell scripts, not HTML: `&` and quotes stay as they are.
        autoescape=False,
    )
    try:
        return environment.get_template(f"{template}.sh.j2").render(values)
    except TemplateError as error:
        raise RequestError(f"the template {template}.sh.j2 of {folders[0]} cannot be rendered: {error}") from error


def _keys(kind: type[Site]) -> list[str]:
    return list(kind.__dataclass_fields__)
