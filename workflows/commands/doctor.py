"""``hyfi doctor``: check everything that other commands need, and print how to fix problems."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from data.children import child_environment
from data.cores import describe_excess_threads, usable_cores
from hyfi_core.job_limits import available_memory
from workflows.console import emit_json, say

PROBE_SECONDS = 120
MIN_SHARED_MEMORY_BYTES = 64 << 20  # MPI ranks of one node communicate through it


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        name: Name of the check.
        ok: Whether it succeeded.
        detail: Version, device, or what went wrong.
        mend: The command that fixes the problem, if there is one.
        essential: Whether other commands need it.
    """

    name: str
    ok: bool
    detail: str
    mend: str = ""
    essential: bool = True


def run(as_json: bool) -> int:
    """Print all findings; return 0 if all essential checks succeed, else 1."""
    findings = []
    for name, (check, mend) in CHECKS.items():
        finding = _tried(name, check, mend)
        findings.append(finding)
        say(_line(finding))
    broken = [finding for finding in findings if finding.essential and not finding.ok]
    say()
    say(
        "everything works"
        if not broken
        else f"{len(broken)} of {len(findings)} checks failed; run the commands above to fix them"
    )
    if as_json:
        emit_json({"ok": not broken, "checks": [asdict(finding) for finding in findings]})
    return 1 if broken else 0


def _line(finding: Finding) -> str:
    mark = "ok     " if finding.ok else ("missing" if finding.essential else "note   ")
    text = f"{mark} {finding.name}: {finding.detail}"
    return text if finding.ok or not finding.mend else f"{text}\n        fix: {finding.mend}"


def _tried(name: str, check: Callable[[], Finding | str], mend: str) -> Finding:
    """Run a check: returned text is the detail of a success, an exception is a failure."""
    try:
        outcome = check()
    except Exception as error:
        reason = str(error).strip() or type(error).__name__
        return Finding(name, False, reason.splitlines()[-1], mend)
    return outcome if isinstance(outcome, Finding) else Finding(name, True, outcome)


def _python() -> str:
    return f"{platform.python_version()} ({sys.executable})"


def _torch() -> str:
    """Return the version of PyTorch and its device."""
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        device = f"{len(names)} × {names[0]}, CUDA {torch.version.cuda}"
    else:
        device = f"CPU with {torch.get_num_threads()} threads"
    return f"{torch.__version__}, {device}"


def _mpiexec() -> str:
    from workflows.launch import mpiexec

    launcher = mpiexec.find_mpiexec()
    return f"{launcher.flavour} ({launcher.path})"


def _halo() -> str:
    """Compare a halo exchange of two ranks with one process; return the result as text.

    The probe runs in another process, because MPI must not be initialised in this one.
    """
    probe = [sys.executable, "-m", "workflows.commands.bench.halo_probe"]
    # Without the variables of a launcher: the probe starts its own ranks, also below `srun` or `mpiexec`.
    environment = child_environment()
    completed = subprocess.run(
        probe, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False, env=environment
    )
    if completed.returncode != 0:
        raise RuntimeError(completed.stderr.strip() or f"ended with code {completed.returncode}")
    result = json.loads(completed.stdout.splitlines()[-1])
    return f"two ranks agree with one process, over {result['mpi']} (largest difference {result['difference']:.0e})"


def _slides() -> str:
    """Write a tiny tiled JPEG slide and read it back with this project's reader."""
    import numpy as np
    import tifffile

    from hyfi_core.plan.box import Box
    from pathology.readers.sources import open_source

    pixels = np.full((256, 256, 3), 200, np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.tif"
        tifffile.imwrite(
            path, pixels, tile=(256, 256), compression="jpeg", photometric="rgb", resolution=(20000, 20000)
        )
        source = open_source(path)
        try:
            read = source.read(Box(0, 256, 0, 256), 0)
        finally:
            source.close()
    if abs(int(read.mean()) - 200) > 3:  # JPEG is lossy
        raise RuntimeError(f"pixels of value 200 are read as {read.mean():.0f}")
    version = importlib.metadata.version
    return f"OpenSlide through openslide-python {version('openslide-python')}, tifffile {version('tifffile')}"


def _zarr() -> str:
    """Write and read a sharded array with the store's codecs."""
    import numpy as np
    import zarr
    from zarr.codecs import Crc32cCodec, ZstdCodec

    pixels = np.arange(3 * 64 * 64, dtype=np.uint8).reshape(3, 64, 64)
    codec = ZstdCodec(level=1), Crc32cCodec()
    with tempfile.TemporaryDirectory() as folder:
        array = zarr.create_array(
            folder, shape=pixels.shape, dtype="uint8", chunks=(3, 32, 32), shards=(3, 64, 64), compressors=codec
        )
        array[:] = pixels
        same = np.array_equal(np.asarray(zarr.open_array(folder, mode="r")[:]), pixels)
    if not same:
        raise RuntimeError("a sharded array differs after writing and reading")
    return f"{zarr.__version__}, sharded, zstd with crc32c"


def _packages() -> str:
    """Import the remaining packages, and say so.

    Raises:
        RuntimeError: Some cannot.
    """
    names = (
        "skimage",
        "imagecodecs",
        "PIL",
        "safetensors",
        "pydantic",
        "yaml",
        "jinja2",
    )
    missing = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise RuntimeError(f"cannot be imported: {', '.join(missing)}")
    return "all importable"


def _viewer() -> Finding | str:
    """Return the packages of ``hyfi view``, or those that are missing; nothing else needs them."""
    missing = [name for name in ("starlette", "uvicorn", "anyio") if importlib.util.find_spec(name) is None]
    if missing:
        detail = f"not installed: {', '.join(missing)}"
        return Finding("viewer", False, detail, "for hyfi view: pip install 'hyfi[view]'", essential=False)
    return "starlette, uvicorn"


def _threads() -> Finding | str:
    """Return settings that affect speed; a finding if this process has more threads than cores."""
    import torch

    from workflows.launch.launch import RANK_SETTINGS

    names = ("OMP_NUM_THREADS", "THP_MEM_ALLOC_ENABLE", "MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "LD_PRELOAD")
    settings = ", ".join(f"{name}={os.environ.get(name, 'unset')}" for name in names)
    # The launcher's settings of ranks, which the user's environment overrides.
    ranks = ", ".join(f"{name}={os.environ.get(name, value)}" for name, value in RANK_SETTINGS.items())
    cores = usable_cores()
    detail = f"{cores} cores for this process; {settings}; ranks get {ranks}; transparent huge pages: {_huge_pages()}"
    excess = describe_excess_threads(torch.get_num_threads(), cores)
    if excess is None:
        return detail
    excess_text, _, mend = excess.partition("; ")  # "problem; how to fix it"
    return Finding("threads", False, f"{excess_text}; {detail}", mend, essential=False)


def _huge_pages() -> str:
    """Return the kernel's setting of transparent huge pages; if it is "never", the ranks' setting has no effect."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "unknown"
    # The chosen setting is in brackets: "always [madvise] never".
    return text.partition("[")[2].partition("]")[0] or "unknown"


def _memory() -> str:
    """Return the free memory, and what limits it."""
    limit = available_memory()
    return f"{limit.free_bytes / 2**30:.1f} GiB free for this process{f' ({limit.source})' if limit.source else ''}"


def _shared_memory() -> Finding | str:
    """Return how much shared memory is free, which MPI uses between ranks of a node."""
    folder = "/dev/shm"
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes >= MIN_SHARED_MEMORY_BYTES:
        return f"{free_bytes / 2**30:.1f} GiB free in {folder}"
    detail = f"only {free_bytes / 2**20:.0f} MiB free in {folder}; ranks of one node may fail to start"
    return Finding("shared memory", False, detail, "in a container: docker run --shm-size=1g …", essential=False)


REINSTALL = "pip install --upgrade --force-reinstall hyfi"
CHECKS: dict[str, tuple[Callable[[], Finding | str], str]] = {
    "Python": (_python, "install Python 3.11 or newer and make a new environment with it"),
    "torch": (_torch, "pip install torch (https://pytorch.org/get-started/locally says which for your GPU)"),
    "MPI": (_mpiexec, "pip install 'hyfi[local]', or load your cluster's MPI module"),
    "two-rank halo exchange": (
        _halo,
        "fix MPI and torch first; to see the error: python -m workflows.commands.bench.halo_probe",
    ),
    "slides": (_slides, "pip install --upgrade openslide-python openslide-bin tifffile imagecodecs"),
    "zarr": (_zarr, "pip install --upgrade 'zarr>=3.0.8'"),
    "packages": (_packages, REINSTALL),
    "viewer": (_viewer, ""),
    "memory": (_memory, ""),
    "shared memory": (_shared_memory, ""),
    "threads": (_threads, ""),
}
