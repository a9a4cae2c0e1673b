"""What each of two ranks of ``torchrun`` or MPI does: an engine of shards beside a plain one, over the same slides."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from torch import nn

import hyfi_core
import hyfi_core.tiles.engine as tiles_engine
from hyfi_core.runtime.saving.weight_shards import own_part
from tests.hyfi_core.tiles.bags import TILE_PX, WIDTH, Attention, SmallViT, bags, token

SIZES, LABELS = (5, 1, 4), torch.tensor([0, 2, 1])
STEPS = 3


class OfManyTiles(Attention):
    """Says the same of every slide with fewer than three tiles, so that the loss does not depend on those tiles."""

    def forward(self, features, coords):
        assert features.dim() == 2
        return super().forward(features, coords)[0] if len(features) >= 3 else self.classify.bias


class OtherForOne(nn.Module):
    """Returns what its last layer did for one tile, and a new tensor for several."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(12, 9), nn.GELU(), nn.Linear(9, WIDTH))
        self.bias = nn.Parameter(torch.full((3, 1, 1), 0.1))

    def forward(self, tiles):
        features = self.net(tiles + self.bias)
        return {"cls": features if len(tiles) == 1 else features * 1}


def make(comm, plan, shard, train="all", dtype=torch.float64, aggregator=Attention, encoder=SmallViT, **more):
    torch.manual_seed(4)
    encoder, aggregator = encoder(), aggregator()
    if train == "last":  # the last block, and updates of the first one's matrices
        from workflows.encoders.lora import add_lora

        add_lora(encoder, 1)
        for name, parameter in encoder.named_parameters():
            parameter.requires_grad_(("parametrizations" in name and "original" not in name) or "blocks.1" in name)
    encoder, aggregator = encoder.to(dtype), aggregator.to(dtype)
    if isinstance(encoder, SmallViT):
        encoder.patches.to(memory_format=torch.channels_last)
    return hyfi_core.parallelize_tiles(
        encoder, aggregator, plan, comm, output=token, shard=shard,
        optimizer=lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1), **more,
    )  # fmt: skip


def close(a, b, what, atol=1e-12):
    assert a.keys() == b.keys(), (what, a.keys() ^ b.keys())
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=1e-10, atol=atol), (
            what,
            name,
            float((a[name] - b[name]).abs().max()),
        )


def same_steps(engine, plain, slides, labels, steps=STEPS):
    for step in range(steps):
        losses = [e.accumulate(slides, labels) for e in (engine, plain)]
        assert abs(losses[0] - losses[1]) < 1e-11, (step, losses)
        gradients = [e.gather_gradients() for e in (engine, plain)]
        if gradients[0] is not None:
            close(*gradients, ("gradients", step))
        norms = [e.update(max_norm=0.5) for e in (engine, plain)]
        assert abs(norms[0] - norms[1]) < 1e-10 * norms[1], norms


def states(engine, plain):
    found = [engine.gather_state_dict(), plain.gather_state_dict()]
    if found[0] is not None:
        close(*found, "weights", 1e-9)


def same_predictions(engine, plain, slides):
    (logits, attention), (expected, weights) = engine.predict(slides), plain.predict(slides)
    assert torch.allclose(logits, expected, rtol=0, atol=1e-9)
    assert all(torch.allclose(a, b, rtol=0, atol=1e-9) for a, b in zip(attention, weights, strict=True))


def check_shares(engine, plain, ranks):
    """A rank holds its part of weights, moments and gradients of the encoder, and nothing else of it."""
    held, whole, rows = 0, 0, 0
    for parameter in engine.encoder.parameters():
        tensors = [parameter, *engine.optimizer.state[parameter].values()]
        held += sum(own_part(t).nbytes for t in tensors if t.dim())
        rows += sum(own_part(t)[:1].nbytes for t in tensors if t.dim())
    for parameter in plain.encoder.parameters():
        whole += sum(t.nbytes for t in (parameter, *plain.optimizer.state[parameter].values()) if t.dim())
    assert abs(held - whole / ranks) <= rows, (held, whole / ranks, rows)
    print(f"held {held / whole:.3f} of the whole, on one of {ranks} ranks", flush=True)


def check_resumed(comm, plan, engine, plain, slides, folder):
    """Checkpoints go from shards to whole weights and back."""
    engine.save(folder / "shards")
    plain.save(folder / "whole")
    for shard, saved in ((True, "whole"), (False, "shards"), (True, "shards")):
        resumed = make(comm, plan, shard, chunk=3)
        resumed.load(folder / saved)
        assert (resumed.random.seed, resumed.random.step) == (plain.random.seed, plain.random.step)
        undisturbed = make(comm, plan, False, chunk=2)
        undisturbed.load(folder / "whole")
        same_steps(resumed, undisturbed, slides, LABELS, 2)
        states(resumed, undisturbed)


def check_keeping(comm, plan, slides):
    """Ranks with room for other numbers of chunks keep the same number."""
    rooms = tiles_engine.chunks_kept
    tiles_engine.chunks_kept = lambda *given: 1 + comm.rank
    try:
        engine, plain = (make(comm, plan, shard, chunk=2) for shard in (True, False))
        same_steps(engine, plain, slides, LABELS, 1)
    finally:
        tiles_engine.chunks_kept = rooms
    assert engine.kept[0] == 1, engine.kept


def check_float32(comm, plan):
    """Sums of float32 take another way in the library; autocast keeps its own copies."""
    slides = bags(SIZES, torch.float32)
    engine, plain = (make(comm, plan, shard, dtype=torch.float32, autocast=torch.bfloat16) for shard in (True, False))
    losses = [e.accumulate(slides, LABELS) for e in (engine, plain)]
    assert abs(losses[0] - losses[1]) < 1e-5
    gradients = [e.gather_gradients() for e in (engine, plain)]
    if gradients[0] is not None:
        close(*gradients, "gradients in float32", 1e-3)


def check_slides_without_gradients(comm, plan):
    """Ranks are at other slides at a time: one whose cotangent is None, the other at one that has some."""
    slides, labels = bags((2, 5, 1, 4, 1)), torch.tensor([0, 2, 1, 0, 1])
    engine, plain = (make(comm, plan, shard, aggregator=OfManyTiles, chunk=2) for shard in (True, False))
    same_steps(engine, plain, slides, labels, 1)
    same_steps(engine, plain, slides[:1], labels[:1], 1)


def check_graphs_of_one_tile(comm, plan):
    """Ranks whose graphs differ gather in the same order."""
    engine, plain = (make(comm, plan, shard, encoder=OtherForOne, chunk=2) for shard in (True, False))
    same_steps(engine, plain, bags((3,)), LABELS[:1], 1)


def check_refusals(comm, plan):
    def refused(says, **more):
        try:
            make(comm, plan, **{"shard": True} | more)
        except hyfi_core.RequestError as error:
            assert says in str(error), error
        else:
            raise AssertionError(says)

    refused("'frozen', or shard=False", batch_norm="exact")
    refused("pass True or False", shard="yes")
    engine = make(comm, plan, True)
    next(engine.encoder.parameters()).requires_grad_(False)
    try:
        engine.accumulate(bags(SIZES), LABELS)
    except hyfi_core.RequestError as error:
        assert "has changed since the engine was made" in str(error)
    else:
        raise AssertionError("a change of requires_grad is refused")
    slides = bags(SIZES, torch.float64 if comm.rank == 0 else torch.float32)
    try:  # before one rank alone would try the encoder
        make(comm, plan, True).accumulate(slides, LABELS)
    except hyfi_core.RequestError as error:
        assert "ranks disagree: the shape and dtype of tiles is" in str(error)
    else:
        raise AssertionError("other tiles on other ranks are refused")


def two_ranks(comm, folder):
    slides, plan = bags(SIZES), hyfi_core.ParallelPlan(tiles=comm.size)
    for train in ("last", "all"):
        engine, plain = (make(comm, plan, shard, train, chunk=2) for shard in (True, False))
        same_steps(engine, plain, slides, LABELS)
        states(engine, plain)
    check_shares(engine, plain, comm.size)
    same_predictions(engine, plain, slides)
    same_steps(engine, plain, slides, LABELS, 1)  # prediction left the weights divided
    check_resumed(comm, plan, engine, plain, slides, folder)
    check_keeping(comm, plan, slides)
    check_float32(comm, plan)
    check_slides_without_gradients(comm, plan)
    check_graphs_of_one_tile(comm, plan)
    check_refusals(comm, plan)


def two_replicas(comm):
    plan, replica = hyfi_core.ParallelPlan(tiles=comm.size // 2, replicas=2), comm.rank // (comm.size // 2)
    slides, labels = [bags(SIZES)[:1], bags(SIZES)[1:]][replica], [LABELS[:1], LABELS[1:]][replica]
    engine, plain = (make(comm, plan, shard, chunk=2) for shard in (True, False))
    same_steps(engine, plain, slides, labels, 3)
    states(engine, plain)
    check_shares(engine, plain, comm.size // 2)


def fail(comm):
    """Rank 1 cannot read its tiles while rank 0 waits for its weights."""

    class Tiles(hyfi_core.TensorTiles):
        like = ((3, TILE_PX, TILE_PX), torch.float64)

        def read(self, indices):
            if comm.rank:
                raise OSError("the disk is gone")
            return super().read(indices)

    slides = [Tiles(torch.rand(4, *Tiles.like[0], dtype=torch.float64), torch.zeros(4, 2))]
    make(comm, hyfi_core.ParallelPlan(tiles=comm.size), True).accumulate(slides, LABELS[:1])


def main() -> None:
    warnings.filterwarnings("error", message=".*view tensor.*")
    comm = hyfi_core.init()
    if sys.argv[1] == "fail":
        fail(comm)
    elif comm.size == 2:
        two_ranks(comm, Path(sys.argv[1]))
    else:
        two_replicas(comm)
    comm.barrier()
    if comm.rank == 0:
        print("equal", flush=True)


if __name__ == "__main__":
    main()
