"""The engine of slides as bags of tiles: an encoder and an aggregator trained exactly by many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyfi_core.capture.released import device_of, dtype_of
from hyfi_core.comm.activity import ACTIVITY
from hyfi_core.comm.agreement.agree import CallConsensus, agree
from hyfi_core.comm.agreement.same_weights import SameWeights
from hyfi_core.comm.agreement.weight_watch import WeightWatch
from hyfi_core.comm.base import Communicator
from hyfi_core.comm.counted import Span
from hyfi_core.errors import RequestError
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.placement import Placement
from hyfi_core.runtime.calls.engine_state import EngineState
from hyfi_core.runtime.calls.gradient_scale import GradientScale
from hyfi_core.runtime.calls.parameter_hooks import ParameterHooks
from hyfi_core.runtime.executor import autocasting, evaluating, without_grad
from hyfi_core.runtime.groups import Groups
from hyfi_core.runtime.losses.loss_function import Loss, LossFunction
from hyfi_core.runtime.mirror import Mirrors
from hyfi_core.runtime.ownership import ParameterOwnership, made_optimizer
from hyfi_core.runtime.settings import OptimizerFactory
from hyfi_core.runtime.subject import RandomKey
from hyfi_core.tiles.aggregator_call import aggregator_call
from hyfi_core.tiles.chunks import SlideParts, TileChunk, first_slides
from hyfi_core.tiles.encoding.encoder_call import EncoderCall
from hyfi_core.tiles.encoding.encoder_facts import EncoderFacts, tried
from hyfi_core.tiles.encoding.encoder_pass import EncoderPass
from hyfi_core.tiles.encoding.kept_vectors import KeptVectors
from hyfi_core.tiles.explanation import TileExplanation, explained
from hyfi_core.tiles.gradients import TileGradients
from hyfi_core.tiles.head import BagHead
from hyfi_core.tiles.keyed_draws import DrawKey
from hyfi_core.tiles.memory_budget import KeepingRoom, MemoryNeeds, chunk_size, chunks_kept, new_bytes, read_bytes
from hyfi_core.tiles.model import OneStage, TileModel
from hyfi_core.tiles.reading import ChunkReader, Like, SourceReader
from hyfi_core.tiles.settings import TileSettings, TriedModel
from hyfi_core.tiles.source import TileSource, check_slides, gather_lengths, tile_like
from hyfi_core.tiles.spread import AttentionSpread

_FACTS_KEPT = 16


class TilesEngine(EngineState):
    """An encoder and an aggregator distributed over ranks; created by ``parallelize_tiles``.

    All methods are collective over the ranks of the plan. Names of weights and gradients are ``encoder.*`` and
    ``aggregator.*``.

    Attributes:
        plan: the plan.
        device: device of the model.
        kept: (chunks whose activations were kept, all chunks) of this rank in the last step.
        random: the key of random numbers, the same on all ranks.
        read_wait_s: seconds that this rank has waited for tiles, in all steps so far.
        vectors: feature vectors of a frozen encoder that this rank keeps between steps; None: it keeps none.
        reader: reads the tiles of training steps; predictions read from the slides directly.
    """

    segments = None
    """Encoders are not compiled."""
    _passes = EncoderPass

    def __init__(
        self,
        model: TileModel,
        plan: ParallelPlan,
        comm: Communicator,
        loss: Loss,
        optimizer: OptimizerFactory | None,
        settings: TileSettings,
    ) -> None:
        self._model: TileModel = model
        self.plan, self.device, self._settings = plan, device_of(model), settings
        dtype, exact = dtype_of(model), settings.batch_norm == "exact"
        self._call = EncoderCall(model.encoder, settings.output, settings.autocast, self.device, dtype, exact)
        self._groups = Groups(comm, plan, Placement.of(plan))
        # One seed for all ranks; 63 bits, as it is sent and hashed as an int64.
        self.random = RandomKey(int(comm.broadcast_object(torch.initial_seed() & (2**63 - 1))))
        # Before anything below looks at weights: ``SameWeights`` compares them between ranks.
        self._distribute(comm)
        self.kept, self.read_wait_s = (0, 0), 0.0
        self._attention, self._attended_tiles = list[torch.Tensor](), list[int]()
        self.unsaved = {name for name, _ in model.named_buffers()} - set(model.state_dict())
        self._stage_names = OneStage(model)
        self._ownership = self._make_ownership()
        self._mirrors = Mirrors(model, self._groups, used=False)
        self._watch = WeightWatch(self._watched(), self._mirrors.arriving)
        weights = SameWeights(self._watch, self._ownership.held(), self.settle, resend=lambda: None)
        no_changes = dict  # of the model's Python state: nothing is captured
        self._consensus = CallConsensus(model, comm, self._groups.replica, no_changes, weights, loss, shares=True)
        self._scale = GradientScale(())  # of no parameters: gradients are not measured
        self._optimizer = made_optimizer(optimizer, self._ownership.optimized(), staged=False)
        parameters = {id(parameter) for parameter in model.parameters()}
        self._loss = LossFunction(
            loss, lambda: autocasting(self.device, settings.autocast), comm.size == 1, parameters, {}
        )
        self.vectors: KeptVectors | None = None
        self.reader: ChunkReader = SourceReader()
        self._chunk: int | None = settings.chunk  # tiles of a chunk in the last step
        self._trials: dict[Any, TriedModel] = {}  # by tiles, flags and whether in training
        self._gradients: dict[tuple[str, ...], TileGradients] = {}  # by the names of trained parameters

    def predict(self, tiles: Sequence[TileSource]) -> tuple[torch.Tensor, list[torch.Tensor] | None]:
        """Return the logits ``(B, K)`` and the attention of each slide, in evaluation mode, with all tiles.

        Both are the same on every rank of a replica. Memory does not grow with the number of tiles, except for their
        features.

        Args:
            tiles: a source for each slide of this replica's batch.

        Returns:
            Attention is as the aggregator returns it, without a dim for the batch; None if it returns none.
        """
        trials, _, results = self._evaluated(agree(self._groups.replica, lambda: check_slides(tiles, labels=None)))
        batched = trials.call.batched  # whether the aggregator takes and returns a batch of one slide
        attention = [a.squeeze(0) if batched and a.dim() > 1 else a for _, a in results if a is not None]
        return torch.stack([logits for logits, _ in results]), attention or None

    def explain(self, tiles: TileSource) -> TileExplanation:
        """Return each tile's own logits and its contribution to its slide's; in evaluation mode, equal on all ranks."""
        (slide,) = agree(self._groups.replica, lambda: check_slides([tiles], None))
        trials, features, results = self._evaluated([slide])
        with evaluating(self._model, self.device):
            return explained(trials.call, features[0], slide.coords, results[0], self._groups.replica.of("stage"))

    def _evaluated(
        self, slides: list[TileSource]
    ) -> tuple[TriedModel, list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor | None]]]:
        """Return the tried model, the features of each slide, and its (logits, attention), in evaluation mode."""
        comm = self._groups.replica
        self._groups.reset_traffic()
        parts = SlideParts(gather_lengths(comm, slides, comm.size)[0], comm.size)  # of this replica alone
        counts = (len(slides), sum(parts.tiles), 0, 0)  # instead of the shape of a batch of images
        self._consensus.check_evaluation("predict", counts, "tiles")
        with evaluating(self._model, self.device), without_grad():
            trials = agree(comm, lambda: self._tried(slides, train=False))
            features, _ = self._pass(trials, slides, parts, train=False).forward(kept=0)
            key = DrawKey(self.random.seed, step=0, slide=0)
            results = [trials.call(bag, slide.coords, key) for bag, slide in zip(features, slides, strict=True)]
        return trials, features, results

    def accumulate(self, tiles: Sequence[TileSource], labels: torch.Tensor) -> float:
        """Run forward and backward of a step; the gradients are reduced over all ranks and added to earlier ones.

        Args:
            tiles: a source for each slide of this replica's batch; other replicas may have more or fewer slides. Each
                rank reads its own tiles of each slide.
            labels: labels of these B slides, ``(B, …)``.

        Returns:
            The loss of the slides of all replicas together, the same on every rank.

        Raises:
            RequestError: on every rank, before anything is computed: a slide has no tiles, ranks were given other
                slides, the encoder cannot be computed chunk by chunk, or ``plan.memory_bytes`` is too little.
        """
        return float(self.accumulate_unread(tiles, labels))

    def accumulate_unread(self, tiles: Sequence[TileSource], labels: torch.Tensor) -> torch.Tensor:
        """Like ``accumulate``; the loss stays on the device, float64 without dims, and the host does not wait."""
        everyone, replica = self._groups.all, self._groups.replica
        ACTIVITY.begin_step()
        ACTIVITY.action = "comparing this call"
        self._groups.reset_traffic()
        # Each check is agreed on by all ranks: one that refused alone would leave the others waiting.
        slides = agree(everyone, lambda: check_slides(tiles, labels))
        batches = gather_lengths(everyone, slides, replica.size)
        firsts = first_slides([len(batch) for batch in batches])
        parts = SlideParts(batches[self._groups.replica_index], replica.size, firsts[self._groups.replica_index])
        # Numbers of slides and tiles stand for the shape of an image batch.
        self._consensus.check_training((len(slides), sum(parts.tiles), 0, 0), "tiles", labels, self._optimizer)
        trials = agree(everyone, lambda: self._tried(slides, train=True))
        encoding = self._pass(trials, slides, parts, train=True)
        room = self._room(trials, encoding)
        kept = agree(everyone, lambda: self._chunks_kept(trials, encoding, room.needs))
        hooks = ParameterHooks(dict(self._model.named_parameters()), backwards=1)
        head = BagHead(trials.call, self._model, self._loss, self._groups, [len(batch) for batch in batches])
        # The caller may be in inference mode or no_grad, which would make a step without gradients.
        with self._watch.changing(noticed=True), hooks, torch.inference_mode(False), torch.enable_grad():
            loss = self._step(encoding, head, labels, kept, None if self._keeps_all(trials.facts) else room, hooks)
            self._take_buffers()
        ACTIVITY.action = None
        self.read_wait_s += encoding.waited_s
        # Only now, because both passes of this step draw the same numbers.
        self.random.step += 1
        return loss

    def train_step(self, tiles: Sequence[TileSource], labels: torch.Tensor) -> float:
        """Call ``accumulate`` and ``update``; return the loss."""
        loss = self.accumulate_unread(tiles, labels)
        self.update_unread()
        return float(loss)

    def traffic(self) -> dict[str, dict[str, int]]:
        """Return messages and bytes sent by this rank in the last step, by kind; features are of kind ``stage``."""
        return self._groups.traffic()

    def seconds(self) -> dict[str, float]:
        """Return how long this rank waited in the last step, by kind."""
        return self._groups.seconds()

    def record_spans(self, spans: list[Span] | None) -> None:
        """Append (kind, begin, end) of each time spent on messages to ``spans`` from now on; None: no longer."""
        self._groups.record_spans(spans)

    @property
    def encoder(self) -> torch.nn.Module:
        """The encoder, with this rank's weights."""
        return self._model.encoder

    @property
    def aggregator(self) -> torch.nn.Module:
        """The aggregator, with this rank's weights."""
        return self._model.aggregator

    @property
    def spread(self) -> AttentionSpread | None:
        """The attention of this replica's slides in the last step; None if the aggregator returns none."""
        return AttentionSpread.of(self._attention, self._attended_tiles)

    def reserve(self, tiles: Sequence[TileSource]) -> None:
        """Try encoder and aggregator as in training, and check that a step for these slides fits ``memory_bytes``.

        Args:
            tiles: a source for each slide of this replica's batch, the longest ones.

        Raises:
            RequestError: on every rank, as ``accumulate``.
        """
        everyone = self._groups.all
        slides = agree(everyone, lambda: check_slides(tiles, None))
        lengths = gather_lengths(everyone, slides, self._groups.replica.size)[self._groups.replica_index]
        parts = SlideParts(lengths, self._groups.replica.size)
        trials = agree(everyone, lambda: self._tried(slides, train=True))
        encoding = self._pass(trials, slides, parts, train=True)
        needs = agree(everyone, lambda: self._room(trials, encoding).needs)
        agree(everyone, lambda: self._chunks_kept(trials, encoding, needs))
        if self.vectors is not None:
            self.vectors.step_bytes = needs.lasting + needs.working  # which kept vectors must leave free

    def describe(self) -> str:
        """Return the plan as text, and how many chunks the last step kept."""
        kept = f"{self.kept[0]} of {self.kept[1]} chunks kept their activations in the last step of this rank"
        return "\n".join([self.plan.describe().rstrip("\n"), *([kept] if self.kept[1] else [])])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse ``copy.deepcopy`` and ``pickle``."""
        raise RequestError("an engine cannot be copied or pickled, with its rank's connections; copy the modules")

    def _step(
        self,
        encoding: EncoderPass,
        head: BagHead,
        labels: torch.Tensor,
        kept: int,
        room: KeepingRoom | None,
        hooks: ParameterHooks,
    ) -> torch.Tensor:
        """Run both passes around the head; return the loss. As ``room`` allows, ``kept`` chunks keep activations."""
        trains_encoder = bool(encoding.facts.trained)
        with self._call.norms():
            ACTIVITY.action = "encoding tiles"
            features, graphs = encoding.forward(kept if trains_encoder else 0, room)
            self.kept = (sum(graph is not None for graph in graphs), len(graphs))
            ACTIVITY.action = "aggregating features"
            first_key = DrawKey(self.random.seed, self.random.step, encoding.parts.first_slide)
            of_head = head(features, encoding.slides, labels, first_key, trains_encoder)
            del features  # the head needs them no longer, and the second pass needs their memory
            self._attention, self._attended_tiles = of_head.attention, of_head.attended_tiles
            of_encoder = (f"encoder.{name}" for name in encoding.facts.trained)
            # In the model's order: reductions are sent in this order, which must be the same on all ranks.
            position = {name: n for n, (name, _) in enumerate(self._model.named_parameters())}
            trained = tuple(sorted({*of_head.trained, *of_encoder}, key=lambda name: position[name]))
            if trained not in self._gradients:
                dtype = torch.bfloat16 if self.plan.reduce_dtype == "bfloat16" else None
                self._gradients[trained] = self._make_gradients(trained, dtype)
            gradients = self._gradients[trained]
            ACTIVITY.action = "driving tiles backward"
            gradients.begin(of_head.counted)  # those of the head that this rank adds to the sums over ranks
            if trains_encoder:
                encoding.backward(graphs, of_head.features, gradients, room)
            gradients.finish(hooks)
        return of_head.loss

    def _distribute(self, comm: Communicator) -> None:
        """Send the weights of rank 0 to all ranks."""
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            comm.broadcast(tensor.data)

    def _make_ownership(self) -> ParameterOwnership:
        return ParameterOwnership(self._model, self._stage_names, self._groups, self.device)

    def _watched(self) -> torch.nn.Module:
        """Return the module whose weights are the same on all ranks."""
        return self._model

    def _make_gradients(self, trained: tuple[str, ...], dtype: torch.dtype | None) -> TileGradients:
        return TileGradients(self._model, trained, self._groups, dtype)

    def _take_buffers(self) -> None:
        """Take over the running statistics of replica 0, as other engines do."""
        if self.plan.replicas > 1 and any(module.training for module in self._model.modules()):
            for buffer in self._model.buffers():
                self._groups.all.broadcast(buffer)

    def _pass(self, trials: TriedModel, slides: list[TileSource], parts: SlideParts, train: bool) -> EncoderPass:
        """Return the passes over the encoder for these slides, in chunks that fit the plan's memory."""
        # Exact norms exchange sums over a slide in a single call: a chunk (size None) is all of a rank's tiles of it.
        whole = train and self._call.exact and bool(self._call.live_norms)
        size = None if whole else chunk_size(trials.facts, self.plan.memory_bytes, self._settings.chunk)
        self._chunk = size if train else self._chunk
        return self._passes(
            call=self._call,
            facts=trials.facts,
            slides=slides,
            parts=parts,
            chunks=parts.chunks(self._groups.replica.rank, size),
            comm=self._groups.replica.of("stage"),
            seed=self.random.seed,
            step=self.random.step if train else 0,
            like=trials.like,
            trains=train,
            reader=self.reader if train else SourceReader(),
            vectors=self.vectors,
        )

    def own_chunks(self, tiles: Sequence[int]) -> list[TileChunk]:
        """Return this rank's chunks of slides with these numbers of tiles, in chunks of the last step's size."""
        return SlideParts(tuple(tiles), self._groups.replica.size).chunks(self._groups.replica.rank, self._chunk)

    def _chunks_kept(self, trials: TriedModel, encoding: EncoderPass, needs: MemoryNeeds) -> int:
        """Return how many chunks of this rank keep their activations. With exact norms all do, each of a whole slide.

        Raises:
            RequestError: the plan's memory is too little.
        """
        chunks = len(encoding.chunks)
        kept = chunks_kept(needs, self.plan.memory_bytes, self.device, self._groups.sharers(), chunks)
        if not self._keeps_all(trials.facts):
            return kept
        if kept < chunks and self.plan.memory_bytes is not None:
            raise RequestError(
                f"batch_norm is 'exact', so that the activations of all tiles of a slide are kept, but only {kept} of "
                f"{chunks} slides fit plan.memory_bytes {self.plan.memory_bytes:,}; use more ranks (plan.tiles), or "
                f"batch_norm='frozen'"
            )
        return chunks

    def _keeps_all(self, facts: EncoderFacts) -> bool:
        """Whether all activations are kept: exact norms end their backward only with the sums over all tiles."""
        return bool(self._call.exact and self._call.live_norms and facts.trained)

    def _room(self, trials: TriedModel, encoding: EncoderPass) -> KeepingRoom:
        """Return what decides whether a chunk is kept: the memory that a step needs, and the limit."""
        largest, facts = max((len(chunk) for chunk in encoding.chunks), default=0), trials.facts
        tile_bytes = read_bytes(trials.like, self._call.dtype, self.reader.ahead)
        lasting = trials.lasting(encoding.parts.tiles) + encoding.reader.kept_bytes(encoding.slides)
        lasting += new_bytes(self._model, self._optimizer, reduces=self._groups.all.size > 1)
        work = facts.peak if facts.trained else facts.forward
        working = work.of(largest) + tile_bytes * largest
        needs = MemoryNeeds(lasting, working, kept=facts.kept.of(largest))
        return KeepingRoom(needs, self.plan.memory_bytes, self.device)

    def _tried(self, slides: list[TileSource], train: bool) -> TriedModel:
        """Return the trials of encoder and aggregator, with their present flags, for tiles like those of ``slides``."""
        return self._tried_for(tile_like(slides[0]), train)

    def _tried_for(self, like: Like, train: bool) -> TriedModel:
        """Return the trials for tiles of a certain shape and dtype; run them if flags or tiles are new."""
        flags = bytes(module.training for module in self._model.modules())
        flags += bytes(parameter.requires_grad for parameter in self._model.parameters())
        if (like, flags, train) not in self._trials:
            while len(self._trials) >= _FACTS_KEPT:
                self._trials.pop(next(iter(self._trials)))  # dicts keep their order: the oldest trial
            with torch.inference_mode(False), torch.enable_grad():
                self._trials[like, flags, train] = self._trial(like, train)
        return self._trials[like, flags, train]

    def _trial(self, like: Like, train: bool) -> TriedModel:
        """Try the encoder on tiles of this shape and dtype, then the aggregator on features like the encoder's."""
        key = DrawKey(self.random.seed, 0, 0)
        facts = tried(self._call, like[0], key, backward=train)
        if facts.tile_by_tile and self._call.exact and self._call.live_norms:
            raise RequestError("batch_norm is 'exact', but random numbers need a call for each tile; use 'frozen'")
        aggregator, autocast = self._model.aggregator, self._settings.autocast
        call = aggregator_call(aggregator, autocast, self.device, facts.features, facts.dtype)
        vector_bytes = facts.features * facts.dtype.itemsize
        measures = self.plan.memory_bytes is not None and train  # only a memory limit in training needs the bytes
        head_bytes = call.bytes_of(facts.features, facts.dtype) if measures else lambda tiles: 0
        # For each slide of n tiles: features, their cotangents, and what the aggregator needs.
        return TriedModel(facts, call, like, lambda tiles: sum(2 * n * vector_bytes + head_bytes(n) for n in tiles))
