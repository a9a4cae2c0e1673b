"""Check of a GPU machine: what works, how fast, and how much fits.

    python -m workflows.gpu_check --out DIR [--minutes 8] [--only PATTERN]

Writes DIR/gpu-check.json, DIR/gpu-check.txt (one page, which is also printed), DIR/machine.yaml for the planner,
DIR/logs (everything that the parts print, with whole tracebacks), DIR/profiles, and DIR/gpu-check.tar.gz with all of
these. The parts:

    equal        one step in float64 against plain PyTorch: ResNet-18, AmoebaNet-D and a network of another package, on
                 1, 2 and 4 ranks that share a GPU through MPI, and on two GPUs through NCCL; a pipeline, both schedules
                 of two directions, replicas, cells in memory and spilled, recomputation, fused halos. All at once
    tests        those marked cuda
    commands     hyfi synth, ingest, train (alone, and with a loader and a validator), validate; predict against the CPU
    speed        a step of ResNet-50, bfloat16, channels-last: engine on one rank and plain PyTorch
    profile      a profile of each: kernels and calls, and how many calls the engine adds
    cells        a step by cells, 2 × 2 and 4 × 4, in memory and spilled, against one in core: time and peak memory
    pieces       the same for a model in pieces that are recomputed one by one (plan.interleave, plan.recompute)
    memory       peak memory against the forecast of a plan
    staged       two ranks on one GPU, whose messages go through the host, against one rank
    feed         images sent by a loader against an image on the GPU, and the waiting for them
    largest      the largest square image in core and by cells
    background   the first step, and the time until steps use code compiled by child processes: cache empty, then full
    compiled     first and later steps of the compiled engine and of compiled plain PyTorch
    machine      hyfi doctor --measure

Parts run in processes of their own with a share of the time each; one that fails or hangs does not affect the others.
Without a GPU, ``--device cpu`` runs the code of all parts at small sizes; these figures mean nothing.

Exit codes: 0: all parts passed, or could not run here; 1: some failed or ran out of time; 2: there is no GPU.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import platform
import sys
from pathlib import Path
from typing import Any

from hyfi_core.errors import RequestError
from workflows.exit_codes import DONE, SOME_FAILED, exit_code_of


def main(arguments: list[str] | None = None) -> int:
    """Run the check and return its exit code.

    Raises:
        RequestError: There is no GPU, no part has such a name, or the folder cannot be written.
    """
    parser = argparse.ArgumentParser(
        "python -m workflows.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all parts")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", default="*", help="run parts whose name matches this pattern, such as 'equal*'")
    args = parser.parse_args(arguments)
    return _check(args.out, args.minutes, args.device, args.only)


def _check(out: Path, minutes: float, device: str, only: str) -> int:
    """Run the parts whose names match ``only``, and write their results after each; return the exit code."""
    import torch

    from data.files import write_atomically
    from workflows.console import say
    from workflows.gpu_check.parts import all_parts
    from workflows.gpu_check.results import PartResult, as_json, as_text
    from workflows.gpu_check.run_parts import run_parts
    from workflows.gpu_check.setting import FULL, SMALL
    from workflows.paths import require_folder, require_writable

    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if device == "cuda" and not gpus:
        raise RequestError("no GPU was found; run this on a machine with one, or add --device cpu to run its code here")
    every_part = all_parts(FULL if gpus else SMALL)
    parts = [part for part in every_part if fnmatch.fnmatch(part.name, only)]
    if not parts:
        raise RequestError(f"--only {only}: no part has such a name; parts are {', '.join(p.name for p in every_part)}")
    require_folder(out, "the results")
    require_writable(out)
    out.mkdir(parents=True, exist_ok=True)
    machine, results = _machine(gpus), list[PartResult]()

    def report(result: PartResult) -> None:
        results.append(result)
        say(f"{result.outcome}: {result.part}" + (f": {result.reason}" if result.reason else ""))
        # Written after each part, so that a check that is stopped keeps its results.
        write_atomically(out / "gpu-check.json", json.dumps(as_json(machine, results), indent=1).encode())
        write_atomically(out / "gpu-check.txt", as_text(machine, results).encode())

    options = ["--device", device, "--out", str(out.absolute())]
    run_parts(parts, gpus, 60 * minutes, options, out / "logs", report)
    _pack(out)
    say("\n" + as_text(machine, results).rstrip())
    return SOME_FAILED if any(result.outcome in ("failed", "stopped") for result in results) else DONE


def _pack(out: Path) -> None:
    """Write all results into one archive."""
    import tarfile

    # Renamed at the end, as somebody may copy the archive at any time.
    temporary = out / ".gpu-check.tar.gz"
    with tarfile.open(temporary, "w:gz") as archive:
        for name in ("gpu-check.json", "gpu-check.txt", "machine.yaml", "logs", "profiles"):
            if (out / name).exists():
                archive.add(out / name, f"gpu-check/{name}")
    temporary.replace(out / "gpu-check.tar.gz")


def _machine(gpus: int) -> dict[str, Any]:
    """Return the device and the versions on which the results depend."""
    import torch

    device = torch.cuda.get_device_name(0) if gpus else platform.processor() or platform.machine()
    return {
        "device": device,
        "gpus": gpus,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
