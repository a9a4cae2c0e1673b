"""``parallelize_tiles``: distributes an encoder of tiles and an aggregator over ranks, after checking its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import nn

from hyfi_core.comm.agreement.agree import agree, compare_requests
from hyfi_core.comm.agreement.described import describe_function
from hyfi_core.comm.base import Communicator
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.process_memory import return_what_is_freed
from hyfi_core.runtime.losses.loss_function import Loss
from hyfi_core.runtime.parallelize import check_choices, check_functions, check_model, check_weights
from hyfi_core.runtime.settings import OptimizerFactory
from hyfi_core.tiles.engine import TilesEngine
from hyfi_core.tiles.memory_budget import LARGE_BLOCK_BYTES
from hyfi_core.tiles.model import TileModel
from hyfi_core.tiles.settings import BatchNormMode, TileSettings


def parallelize_tiles(
    encoder: nn.Module,
    aggregator: nn.Module,
    plan: ParallelPlan,
    comm: Communicator,
    *,
    loss: Loss = F.cross_entropy,
    optimizer: OptimizerFactory | None = None,
    output: Callable[[Any], Any] | None = None,
    autocast: torch.dtype | None = None,
    batch_norm: BatchNormMode = "frozen",
    chunk: int | Literal["auto"] = "auto",
    shard: bool = False,
) -> TilesEngine:
    """Distribute an encoder of tiles and an aggregator of their features over the ranks of a plan.

    A step is that of one process with one graph over all tiles of all slides: the same loss, the same gradients. The
    encoder is computed chunk by chunk, so that memory grows with the number of tiles only by their features.

    Args:
        encoder: any ``nn.Module`` of tiles, ``(n, 3, T, T)`` to ``(n, D)``, unchanged; each tile by itself.
        aggregator: ``(N, D)`` to ``(K,)``, or ``(1, N, D)`` to ``(1, K)``; if its forward has a parameter ``coords``,
            it is given ``(N, 2)``, in level-0 pixels. It may return (logits, attention).
        plan: ``ParallelPlan(tiles=…, replicas=…, memory_bytes=…)``; ``plan.ranks`` must be ``comm.size``.
        comm: communicator of ``hyfi_core.init()``, or a group of its ranks.
        loss: any function of (logits ``(B, K)``, labels) of all slides of all replicas that returns a scalar.
        optimizer: creates an optimizer for a list of parameters; needed for ``update``.
        output: picks the features out of what the encoder returns.
        autocast: dtype of autocast (``torch.bfloat16``).
        batch_norm: of norms of the encoder in training mode: "frozen": they use their running statistics and leave
            them as they are; "exact": statistics over all tiles of a slide, for which the activations of all of them
            are kept.
        chunk: tiles for which the encoder is called at once; it changes rounding only. "auto": as many as memory
            allows, at most 32.
        shard: whether the ranks that share tiles also share the encoder's weights, gradients and optimizer states, by
            FSDP2 (``torch.distributed.fsdp.fully_shard``): each holds its part, and gathers block after block in every
            call. Worth its messages where an encoder does not fit a GPU. With ``plan.tiles`` of 1 it changes nothing.

    Raises:
        RequestError: plan, ranks or modules are not compatible, or differ between ranks: the same error on every rank,
            before anything is changed.
    """
    agree(comm, lambda: check_choices(autocast, optimizer, "auto"))
    agree(comm, lambda: _check(encoder, aggregator, plan, comm, batch_norm, chunk, shard))
    agree(comm, lambda: check_functions(loss, output, optimizer))
    model = TileModel(encoder, aggregator)
    own = frozenset(model.modules())
    settings: dict[str, object] = {"autocast": autocast, "batch_norm": batch_norm, "chunk": chunk, "shard": shard}
    settings |= {"optimizer": "given" if optimizer is not None else "none"}
    settings |= {"loss": describe_function(loss, own), "output": describe_function(output, own)}
    # Tiles come with each step: no shape to compare yet.
    compare_requests(comm, model, (0, 0, 0, 0), plan, settings)
    if plan.memory_bytes is not None:
        return_what_is_freed(LARGE_BLOCK_BYTES)  # to the system, at once: the limit is that of the process
    tile_settings = TileSettings(output, autocast, batch_norm, None if chunk == "auto" else chunk)
    if shard and comm.size > plan.replicas:
        from hyfi_core.tiles.sharding.sharded_engine import ShardedTilesEngine

        return ShardedTilesEngine(model, plan, comm, loss, optimizer, tile_settings)
    return TilesEngine(model, plan, comm, loss, optimizer, tile_settings)


def _check(
    encoder: object,
    aggregator: object,
    plan: object,
    comm: Communicator,
    batch_norm: object,
    chunk: object,
    shard: object,
) -> None:
    """Refuse arguments of ``parallelize_tiles`` that this rank alone can see to be wrong."""
    for what, module in (("encoder", encoder), ("aggregator", aggregator)):
        if not isinstance(module, nn.Module):
            raise RequestError(f"{what} is {type(module).__name__}; pass a torch.nn.Module")
        check_model(module)
        check_weights(module, None, verify=False)
    if not isinstance(plan, ParallelPlan) or plan.tiles is None:
        given = "has no tiles" if isinstance(plan, ParallelPlan) else f"is a {type(plan).__name__}"
        raise RequestError(f"plan {given}; pass hyfi_core.ParallelPlan(tiles=RANKS_OF_A_SLIDE)")
    if plan.ranks != comm.size:
        raise RequestError(
            f"the plan needs {plan.ranks} ranks, but {comm.size} are running; start {plan.ranks}, or change plan.tiles"
        )
    if batch_norm not in get_args(BatchNormMode):
        raise RequestError(f"batch_norm is {batch_norm!r}; pass 'frozen' or 'exact'")
    if chunk != "auto" and (isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1):
        raise RequestError(f"chunk is {chunk!r}; pass 'auto', or a number of tiles from 1")
    if not isinstance(shard, bool):
        raise RequestError(f"shard is {shard!r}; pass True or False")
    if shard and batch_norm == "exact":
        raise RequestError(
            "shard is True and batch_norm is 'exact', which waits for all tiles of a slide inside of a call while the "
            "other ranks gather weights; use batch_norm='frozen', or shard=False"
        )
