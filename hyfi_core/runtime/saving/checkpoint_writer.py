"""Checkpoints: each rank writes its own part, on a thread, while training continues.

::

    main thread   step │copy│ step        │ step             │ step │link│
    rank 0              ╰─▶ model-00001-of-00002.safetensors │ ╰─▶ JSON files, rename: published
    rank 1              ╰─▶ model-00002-of-00002.safetensors │

The state is copied into host memory, and only this takes the time of a step. Ranks vote between steps (with a vote that
they have anyway): when no rank writes any more, all parts are on disk, and rank 0 publishes them. Until then there is
nothing under the final name, so a rank that is killed at any moment leaves the previous checkpoint.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hyfi_core.comm.activity import ACTIVITY
from hyfi_core.comm.base import Communicator
from hyfi_core.current_device import current_device, make_current
from hyfi_core.files import temporary_name
from hyfi_core.runtime.checkpoint import WEIGHTS_FILE, publish, write_tensors
from hyfi_core.runtime.saving.snapshot import SnapshotPool, unflatten


@dataclass(frozen=True)
class CheckpointPart:
    """What one rank writes of a checkpoint; every tensor is in the part of one rank.

    Attributes:
        weights: tensors by their names in the user's model.
        optimizer: result of ``optimizer_state`` for the same parameters; None to leave it out.
        averaged: the moving average of the weights; None where none is kept.
        buffers: those that forwards change and that are not among the weights.
    """

    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Any] | None = None
    averaged: Mapping[str, torch.Tensor] | None = None
    buffers: Mapping[str, torch.Tensor] | None = None


@dataclass
class _Open:
    """The checkpoint that is being written."""

    step: int
    folder: Path
    temporary: Path
    model: Mapping[str, Any]
    state: Mapping[str, Any] | None
    job: _Job
    publishing: bool = False


class CheckpointWriter:
    """Writes checkpoints of a group of ranks, one after the other. Creation is collective.

    Memory: one copy of this rank's part, in host memory.

    Args:
        comm: all ranks; they share a file system.
        writes: whether this rank has a part, in all checkpoints.
    """

    def __init__(self, comm: Communicator, writes: bool) -> None:
        self._comm = comm
        writers = comm.broadcast_object(comm.gather_objects(writes))
        # (index, count) among the ranks that write, for names of files such as model-00002-of-00003.
        self._number = (sum(writers[: comm.rank]), sum(writers)) if writes else None
        # One name on all ranks, because all write into the same temporary folder.
        self._name: str = comm.broadcast_object(uuid.uuid4().hex[:8])
        self._pool = SnapshotPool()
        self._open: _Open | None = None

    @property
    def open_step(self) -> int | None:
        """The step whose checkpoint is not published yet; the same on every rank."""
        return self._open.step if self._open is not None else None

    def begin(
        self,
        folder: Path,
        part: CheckpointPart,
        *,
        step: int,
        model: Mapping[str, Any],
        state: Mapping[str, Any] | None,
    ) -> None:
        """Copy this rank's part, and start writing it; all ranks call this, after the previous one is published.

        Args:
            folder: final name of the checkpoint.
            part: this rank's; may be changed when this returns.
            step: step of the weights.
            model: goes to ``model.json``; only used on rank 0.
            state: goes to ``state.json``; only used on rank 0.
        """
        assert self._open is None, "the previous checkpoint is not published"
        temporary = temporary_name(folder, self._name)
        write = self._writing(temporary, part, step) if self._number is not None else None
        self._open = _Open(step, folder, temporary, model, state, _Job(write))

    def busy(self) -> bool:
        """Return whether this rank is still writing; does not block.

        Raises:
            OSError: it could not write; its files are removed, and nothing is published.
        """
        return self._open is not None and self._open.job.busy()

    def wait(self) -> None:
        """Wait until this rank has written its part or, on rank 0, published the checkpoint.

        Raises:
            OSError: as ``busy``.
        """
        if self._open is not None:
            self._open.job.result()

    def advance(self) -> int | None:
        """Start publishing, or end it, after a vote in which no rank was ``busy``; collective if a checkpoint is open.

        Returns:
            The step of a checkpoint that is published now; None if there is none.
        """
        current = self._open
        if current is None:
            return None
        if current.publishing:
            self._open = None
            return current.step
        # Returns at once: all ranks have voted that they no longer write.
        gathered = self._comm.gather_objects(current.job.result())
        current.publishing = True
        if gathered is not None:
            parts = [item for item in gathered if item]
            current.job = _Job(lambda: _publish(current, parts))
        return None

    def finish(self) -> int | None:
        """Wait until the open checkpoint is published (collective); return its step, None if there was none.

        Raises:
            OSError: this rank could not write; its files are removed, and nothing is published.
        """
        published = None
        # Two rounds: ``advance`` first starts publishing, as a job of rank 0, and then ends it.
        while self._open is not None:
            self._open.job.result()
            # ``advance`` may only be called when no rank writes any more; else a vote between steps ensures that.
            self._comm.barrier()
            published = self.advance()
        return published

    def discard(self) -> None:
        """Remove what all ranks have written of the open checkpoint; for a rank that ends all others after a failure.

        Other ranks may still be writing. The folder is renamed first, so that nothing new gets into it.
        """
        if self._open is not None:
            aside = self._open.temporary.with_name(f"{self._open.temporary.name}-failed")
            with contextlib.suppress(OSError):  # published, or discarded by another rank
                self._open.temporary.rename(aside)
            shutil.rmtree(aside, ignore_errors=True)

    def _writing(self, temporary: Path, part: CheckpointPart, step: int) -> Callable[[], dict[str, Any]]:
        """Copy a part; return the function that writes the copy.

        That function returns what rank 0 publishes: digests of its files, groups of the optimizer, bytes by name.
        """
        optimizer = part.optimizer["tensors"] if part.optimizer is not None else None
        kinds = {"weights": part.weights, "optimizer": optimizer, "averaged": part.averaged}
        present = {kind: tensors for kind, tensors in kinds.items() if tensors is not None}
        if part.buffers:
            present["buffers"] = part.buffers
        state = {f"{kind}/{name}": tensor for kind, tensors in present.items() for name, tensor in tensors.items()}
        # ``changing``: the next update overwrites these tensors; on the same stream, it runs after the copy.
        snapshot = self._pool.acquire(step, state, changing=True)
        copies = unflatten(snapshot.flat, state)
        present_names = {kind: [*tensors] for kind, tensors in present.items()}
        groups = part.optimizer["groups"] if part.optimizer is not None else None
        sizes = {name: tensor.nbytes for name, tensor in part.weights.items()}
        number = self._number
        assert number is not None

        def write() -> dict[str, Any]:
            # Here and not in ``begin``: only this thread waits for the device.
            snapshot.wait()
            copied = {kind: {name: copies[f"{kind}/{name}"] for name in names} for kind, names in present_names.items()}
            # Several ranks create the same folder.
            temporary.mkdir(parents=True, exist_ok=True)
            moments, averaged, buffers = (copied.get(kind) for kind in ("optimizer", "averaged", "buffers"))
            files = write_tensors(temporary, copied["weights"], moments, averaged, buffers, number)
            self._pool.release(snapshot)
            return {"files": files, "groups": groups, "names": sizes}  # bytes of each tensor, by name

        return write


class _Job:
    """Runs a function on a thread of its own; None: there is nothing to run."""

    def __init__(self, call: Callable[[], dict[str, Any]] | None) -> None:
        self._result: dict[str, Any] = {}
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._device = current_device()
        if call is not None:
            # A daemon: a run that fails does not wait for it, and a checkpoint counts only once it is renamed.
            self._thread = threading.Thread(target=self._run, args=(call,), name="checkpoint", daemon=True)
            self._thread.start()

    def busy(self) -> bool:
        """Return whether the function still runs; raise its error, if any."""
        if self._thread is not None and self._thread.is_alive():
            return True
        self.result()
        return False

    def result(self) -> dict[str, Any]:
        """Wait for the function and return its result, or raise its error."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result

    def _run(self, call: Callable[[], dict[str, Any]]) -> None:
        """Run the job in its thread, and keep its result or error."""
        try:
            # CUDA's current device belongs to a thread, and a new one starts with the first GPU.
            make_current(self._device)
            with ACTIVITY.slowly("writing a checkpoint"):
                self._result = call()
        except BaseException as error:  # raised on the main thread
            self._error = error


def _publish(current: _Open, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write the JSON files of a checkpoint whose parts are on disk, and rename it to its final name.

    The result is empty, because jobs return a dict: that of writing a part has its files.
    """
    files = {name: fingerprint for item in parts for name, fingerprint in item["files"].items()}
    groups = _merged([item["groups"] for item in parts])
    try:
        publish(current.temporary, current.folder, files, current.model, groups, current.state, _index(parts))
    except BaseException:
        shutil.rmtree(current.temporary, ignore_errors=True)
        raise
    return {}


def _merged(parts: Sequence[Sequence[Mapping[str, Any]] | None]) -> list[dict[str, Any]] | None:
    """Return the optimizer's groups with the parameters of all parts."""
    states = [groups for groups in parts if groups is not None]
    if not states:
        return None
    return [
        {
            **group,
            "names": [name for groups in states for name in groups[index]["names"]],
            "values": {name: value for groups in states for name, value in groups[index]["values"].items()},
        }
        for index, group in enumerate(states[0])
    ]


def _index(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the index that says which file has each tensor, as transformers writes it; None for a single file."""
    if len(parts) == 1:
        return None
    # Other files of a part, such as those of the optimizer, begin otherwise and are not in the index.
    stem = WEIGHTS_FILE.partition(".")[0] + "-"
    where = {name: next(f for f in part["files"] if f.startswith(stem)) for part in parts for name in part["names"]}
    return {"metadata": {"total_size": sum(sum(part["names"].values()) for part in parts)}, "weight_map": where}
