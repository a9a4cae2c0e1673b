"""A test that two ranks get the same result as one process, with a 3×3 convolution of an image divided in two.

Run as a program, it starts itself on two ranks; rank 0 prints one JSON object.
"""

from __future__ import annotations

import sys

from workflows.console import emit_json
from workflows.exit_codes import DONE, FAULT, exit_code_of
from workflows.launch.launch import inside_launcher, launch_program, run_as_rank

RANKS = 2
TOLERANCE = 1e-10  # float64


def compare() -> int:
    """Compute with all ranks and with this process alone; return 0 if the results agree, else 70."""
    import torch

    import hyfi_core

    torch.manual_seed(0)
    # In float64, a wrong halo is far above the tolerance, and rounding far below.
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(4, 2),
    ).double()
    shape = (1, 3, 32, 48)
    images = torch.rand(shape, dtype=torch.float64)
    comm = hyfi_core.init()
    plan = hyfi_core.ParallelPlan(grids=((1, RANKS),))
    with torch.no_grad():
        expected = model.eval()(images)
    engine = hyfi_core.parallelize(model, shape, plan, comm)
    difference = float((engine.predict(images) - expected).abs().max())
    if comm.rank == 0:
        from hyfi_core.comm import mpi

        emit_json({"ranks": comm.size, "difference": difference, "mpi": " ".join(mpi.flavour().split())})
    return DONE if difference <= TOLERANCE else FAULT


def main() -> int:
    """Run as a rank, or start the ranks; return the exit code."""
    if inside_launcher():
        return run_as_rank(compare)
    return launch_program([sys.executable, "-m", "workflows.commands.bench.halo_probe"], RANKS)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
