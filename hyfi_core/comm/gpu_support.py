"""Whether MPI takes addresses of GPU memory, from what its library and the environment say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

GPU_VARIABLE = "HYFI_MPI_CUDA"
"""``0``: messages of GPUs go through host memory, whatever MPI can."""
_SWITCHED_OFF = ("MPIR_CVAR_ENABLE_GPU", "OMPI_MCA_opal_cuda_support", "OMPI_MCA_mpi_cuda_support")
_SWITCHED_ON = {"CRAY MPICH": "MPICH_GPU_SUPPORT_ENABLED", "MVAPICH2": "MV2_USE_CUDA"}
"""MPIs that take addresses of GPUs only if a variable is 1, and crash otherwise."""


@dataclass(frozen=True)
class GpuSupport:
    """Whether messages are given to MPI in the memory of a GPU.

    Attributes:
        direct: whether they are; otherwise they go through pinned host memory.
        reason: why, as text.
    """

    direct: bool
    reason: str


def gpu_support(version: str, query: Callable[[], int] | None, environment: Mapping[str, str]) -> GpuSupport:
    """Return whether MPI can be given addresses of GPU memory: not if anything is known that would make it crash.

    Args:
        version: ``MPI_Get_library_version``.
        query: ``MPIX_Query_cuda_support`` of the library; None if it has none.
        environment: environment of the process.
    """
    off = [name for name in (GPU_VARIABLE, *_SWITCHED_OFF) if environment.get(name, "").lower() in ("0", "false", "no")]
    if off:
        return GpuSupport(False, f"{off[0]} is {environment[off[0]]}")
    transports = environment.get("UCX_TLS", "all").lower()
    # "^a,b" excludes these transports, "a,b" allows only these.
    excludes, names_cuda = transports.startswith("^"), "cuda" in transports
    if excludes == names_cuda and "all" not in transports.split(","):
        return GpuSupport(False, f"UCX_TLS is {transports}, without a transport for CUDA")
    allocator = environment.get("PYTORCH_ALLOC_CONF", "") + environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments:true" in allocator.lower().replace(" ", ""):
        return GpuSupport(False, "PyTorch's expandable_segments cannot be shared between processes")
    switch = next((name for mpi, name in _SWITCHED_ON.items() if mpi in version.upper()), None)
    if switch is not None:
        value = environment.get(switch, "not set")
        return GpuSupport(value == "1", f"{switch} is {value}")
    if query is None:
        return GpuSupport(False, "this MPI does not say that it can (no MPIX_Query_cuda_support)")
    if not query():
        return GpuSupport(False, "this MPI was built without CUDA (MPIX_Query_cuda_support)")
    return GpuSupport(True, "MPIX_Query_cuda_support")
