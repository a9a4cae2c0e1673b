"""The state of an engine: what it updates, gathers, saves and loads."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyfi_core.comm.agreement.agree import CallConsensus, agree
from hyfi_core.comm.agreement.weight_watch import WeightWatch
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.runtime.calls.gradient_scale import GradientScale
from hyfi_core.runtime.calls.local_use import local_state, mark_stale
from hyfi_core.runtime.gradients import clip
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.mirror import Mirrors
from hyfi_core.runtime.ownership import ParameterOwnership
from hyfi_core.runtime.saving.checkpoint_writer import CheckpointPart
from hyfi_core.runtime.saving.engine_folder import read_engine, restore_random, save_engine
from hyfi_core.runtime.saving.optimizer_state import load_optimizer_state, optimizer_state, restricted
from hyfi_core.runtime.statistics import StageTensors
from hyfi_core.runtime.subject import RandomKey
from hyfi_core.stored_state import fill_buffers


class EngineState:
    """The model and optimizer of an engine on this rank. All methods are collective over the ranks of the plan.

    ``Engine`` sets the attributes.

    Attributes:
        plan: plan of the engine.
        random: the key of random operators, the same on all ranks of a replica.
        unsaved: names of buffers that training changes and the ``state_dict`` leaves out; ``save`` keeps them.
    """

    plan: ParallelPlan
    random: RandomKey
    unsaved: set[str]
    _model: nn.Module
    _groups: Groups
    _ownership: ParameterOwnership
    _optimizer: torch.optim.Optimizer | None
    _mirrors: Mirrors
    _watch: WeightWatch
    _consensus: CallConsensus
    _scale: GradientScale
    _stage_tensors: StageTensors

    @property
    def trains(self) -> bool:
        """Whether it has an optimizer."""
        return self._optimizer is not None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """This rank's optimizer, for the parameters of its stages.

        Raises:
            RequestError: the engine was created without one.
        """
        if self._optimizer is None:
            raise RequestError("this engine has no optimizer; pass parallelize(..., optimizer=lambda params: ...)")
        return self._optimizer

    def update(self, max_norm: float | None = None) -> float | None:
        """Clip gradients to a global norm, run the optimizer step, and clear the gradients.

        Args:
            max_norm: largest norm of all gradients of the model together, on any plan.

        Returns:
            That norm before clipping, the same on every rank; None without ``max_norm``: it is not computed then.
        """
        norm = self.update_unread(max_norm)
        return None if norm is None else float(norm)

    def update_unread(self, max_norm: float | None = None) -> torch.Tensor | None:
        """Like ``update``, but the host does not wait for the norm: it is a float64 scalar tensor on the device."""
        # By which factor the caller has multiplied gradients: the next training call refuses ranks that differ in it.
        # Read before clipping, which changes gradients, too; the host waits only if the caller has changed them.
        factor, norm = self._scale.factor(), None
        if max_norm is not None:
            optimized = self._ownership.optimized()
            if self.plan.stages == 1:
                norm = clip(optimized, optimized, max_norm, None)
            else:
                # Ranks of several stages have different weights, and some share a weight, which counts once.
                norm = clip(optimized, self._ownership.counted(), max_norm, self._groups.plane)
        with self._watch.changing():
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self._consensus.updated(max_norm, factor)
            self._mirrors.send_weights()
            if self.plan.stages > 1:
                self._stage_tensors.updated()
        return norm

    def gather_gradients(self) -> dict[str, torch.Tensor] | None:
        """Return copies of all gradients under the user's names on rank 0, None elsewhere; without unused ones."""
        return self._ownership.gather_gradients()

    def gather_state_dict(self) -> dict[str, torch.Tensor] | None:
        """Return a copy of the user's model's own ``state_dict`` on rank 0, None elsewhere."""
        self.settle()
        return self._ownership.gather_state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load weights and buffers from a ``state_dict`` on every rank; the next call refuses ranks that differ."""
        self.settle()
        self._model.load_state_dict(self._ownership.here(state))
        mark_stale(self._model, None)
        self._consensus.loaded(state)

    def save(
        self,
        folder: str | PathLike[str],
        extra: Mapping[str, Any] | None = None,
        model_json: Mapping[str, Any] | None = None,
    ) -> None:
        """Write weights, buffers, optimizer and random state to a folder; ``load`` goes on as if undisturbed.

        Gradients that were accumulated since the last ``update`` are saved, too.

        The weights are safetensors under the names of the user's model. The folder depends neither on plan nor on
        ranks. It is written under a temporary name, synced and renamed; an earlier checkpoint of this name is replaced.

        Args:
            folder: folder to write, equal on every rank, on a disk that all ranks see.
            extra: what ``load`` will return: numbers, texts, lists and dicts, such as a scheduler's ``state_dict()``.
            model_json: more entries of ``model.json``, where ``hyfi predict`` and ``hyfi validate`` read how to build
                the model and its images.

        Raises:
            RequestError: the folder has other files, or ``extra`` or ``model_json`` is not JSON.
            OSError: it cannot be written.
        """
        self.settle()
        optimizer = None if self._optimizer is None else self.owned_optimizer(gradients=True)
        part = CheckpointPart(self.owned_state(), optimizer, buffers=self.owned_buffers())
        save_engine(Path(folder), self._groups.all, part, self.random, extra, model_json)

    def load(self, folder: str | PathLike[str]) -> Any:
        """Load what ``save`` wrote, under any plan, and return its ``extra``.

        Saved gradients replace those accumulated so far. An engine without optimizer loads weights and buffers
        only; it returns None.

        Raises:
            RequestError: it is no checkpoint, is damaged or of another model, or lacks the optimizer of this engine.
        """
        saved, training = read_engine(Path(folder), self._groups.all, self._model, self._optimizer is not None)
        self.load_state_dict(saved.weights)
        self.load_buffers(saved.buffers or {})
        if training is None:
            return None
        # A parameter without a saved state must have none: an earlier entry would be used with the loaded weights.
        self.optimizer.state.clear()
        self.optimizer.zero_grad(set_to_none=True)
        named = self._model.named_parameters()
        # Each rank loads its own parameters: if one refuses, all must.
        agree(self._groups.all, lambda: load_optimizer_state(self.optimizer, named, training.optimizer))
        # ``update`` measures by which factor the caller has multiplied the gradients: from here on.
        self._scale.remember_gradients()
        restore_random(self.random, training.state)
        return training.state.get("extra")

    def owned_state(self) -> dict[str, torch.Tensor]:
        """Return the entries of the user's ``state_dict`` that this rank writes, not copied; each has one writer."""
        state = local_state(self._model)
        return {name: state[name] for name in self._ownership.owned_names()}

    def owned_optimizer(self, gradients: bool = False) -> dict[str, Any]:
        """Return the optimizer state of the parameters that this rank writes, by name; see ``optimizer_state``."""
        owned = set(self._ownership.owned_names())
        return restricted(optimizer_state(self.optimizer, self._model.named_parameters(), gradients), owned)

    def owned_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that training changes and the ``state_dict`` leaves out, for this rank to write."""
        return self._ownership.owned_buffers(self.unsaved)

    def load_buffers(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """Load what ``owned_buffers`` of all ranks returned."""
        with self._watch.changing():
            fill_buffers(self._model, buffers)
        self.unsaved |= buffers.keys()

    def share_weights(self) -> None:
        """Send changed parameters from the ranks that update them to the ranks that only compute with them."""
        with self._watch.changing():
            self._mirrors.send_weights()
            self._mirrors.settle()

    def settle(self) -> None:
        """Wait for weights that are being sent to this rank; then they may be read or changed."""
        if self._mirrors.current is not None:
            with self._watch.changing():
                self._mirrors.settle()
