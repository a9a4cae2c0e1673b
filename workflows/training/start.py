"""Start of a run on all ranks: roles, checks, model, engine and saved state; nothing is written."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from data.samples.coverage import check_coverage
from hyfi_core.comm.agreement.agree import agree
from hyfi_core.comm.base import Communicator
from hyfi_core.cost.links.link_traffic import link_traffic
from hyfi_core.cost.links.rank_order import in_blocks, rank_order
from hyfi_core.cost.search.cuts import with_cuts
from hyfi_core.errors import RequestError
from hyfi_core.initial_weights import InitialWeights
from hyfi_core.models.by_name import build_model
from hyfi_core.plan.device import DeviceRequest, assign_devices, spare_devices
from hyfi_core.plan.parallel_plan import ParallelPlan
from hyfi_core.plan.roles import RankRoles, assign_roles, loaders_of, with_spare
from hyfi_core.runtime.calls.engine_state import EngineState
from hyfi_core.runtime.checkpoint import (
    Checkpoint,
    TrainingState,
    load_checkpoint,
    load_training_state,
)
from hyfi_core.runtime.engine import Engine
from hyfi_core.runtime.launch import gpus_seen
from hyfi_core.runtime.parallelize import parallelize
from hyfi_core.runtime.saving.engine_folder import restore_random
from hyfi_core.runtime.saving.kept_checkpoints import step_folder
from hyfi_core.runtime.saving.optimizer_state import check_groups, load_optimizer_state
from hyfi_core.stored_state import StoredState
from workflows.config.load import Config, load_config
from workflows.console import say, warn
from workflows.evaluation.evaluate import DatasetImages, EvaluationSet
from workflows.evaluation.models import (
    DTYPES,
    FORMATS,
    convert_to_train,
    other_normalisation,
    set_training,
    unused_settings,
)
from workflows.evaluation.programs import ModelPrograms
from workflows.finetuning.freezing import Freezing, freeze
from workflows.finetuning.weights import load_weights, other_classes
from workflows.launch.resumption import describe_way_out
from workflows.tasks.task import loss_over, make_loss
from workflows.training.checks.norm_batches import describe_norm_change
from workflows.training.job import TrainingJob
from workflows.training.optimisation import optimizer_factory


@dataclass(frozen=True)
class Roles:
    """The role of this rank in the run.

    ::

        rank of the world   0 … trainers−1 │ … + loaders−1 │ … + validators−1

    Attributes:
        world: All ranks in the order above, which may differ from the launcher's.
        trainers: The group of trainers; None on other ranks.
        validators: The group of validators; None on other ranks.
        trainer_ranks: Ranks of the trainers in ``world``.
        loader_ranks: Ranks of the loaders in ``world``.
        validator_ranks: Ranks of the validators in ``world``.
        loaders_of: For each trainer, the loaders that serve it; empty without loaders.
        launcher_rank: This rank as the launcher counts, by which logs and errors name it.
    """

    world: Communicator
    trainers: Communicator | None
    validators: Communicator | None
    trainer_ranks: range
    loader_ranks: range
    validator_ranks: range
    loaders_of: Mapping[int, tuple[int, ...]]
    launcher_rank: int

    @classmethod
    def of(cls, world: Communicator, config: Config, classes: int | None = None) -> Roles:
        """Assign roles to ranks by configuration and host, and trainers to places of the plan (collective).

        Args:
            world: All ranks, in the launcher's order.
            config: The configuration.
            classes: Number of classes; None: trainers keep their order, wherever they are.

        Raises:
            RequestError: On all ranks, if the number of ranks does not match the configuration.
        """
        hosts = gather_hosts(world)
        if isinstance(config.roles.spare, str):
            chosen = with_spare(hosts, config.plan.ranks, config.roles.spare)
        else:
            chosen = assign_roles(hosts, config.trainers, config.roles.loaders, config.roles.validators)
        if classes is not None and not config.roles.spare:
            chosen = _in_place(world, config, classes, chosen, hosts)
        # Every rank calls every `split`, also those of groups that it does not belong to: they are collective.
        ordered = world.split(0, chosen.order.index(world.rank))
        assert ordered is not None
        first_loader = len(chosen.trainers)
        first_validator = first_loader + len(chosen.loaders)
        trainer_ranks, loader_ranks = range(first_loader), range(first_loader, first_validator)
        validator_ranks = range(first_validator, world.size)
        trainers = ordered.split(0 if ordered.rank in trainer_ranks else None, ordered.rank)
        validators = ordered.split(0 if ordered.rank in validator_ranks else None, ordered.rank)
        in_order = RankRoles(tuple(trainer_ranks), tuple(loader_ranks), tuple(validator_ranks))
        serving = loaders_of([hosts[rank] for rank in chosen.order], in_order) if loader_ranks else {}
        return cls(ordered, trainers, validators, trainer_ranks, loader_ranks, validator_ranks, serving, world.rank)

    def describe(self) -> str:
        """Return this rank's role and its number in that role: ``trainer 3``."""
        named = {"trainer": self.trainer_ranks, "loader": self.loader_ranks, "validator": self.validator_ranks}
        own_roles = ((role, ranks) for role, ranks in named.items() if self.world.rank in ranks)
        role, ranks = next(own_roles)
        return f"{role} {ranks.index(self.world.rank)}"


def gather_hosts(world: Communicator) -> list[str]:
    """Return the name of each rank's host, on every rank (collective)."""
    names: list[str] = world.broadcast_object(world.gather_objects(socket.gethostname()))
    return names


def _in_place(world: Communicator, config: Config, classes: int, chosen: RankRoles, hosts: Sequence[str]) -> RankRoles:
    """Return the roles with trainers in the order in which the fewest bytes leave a node (collective).

    If the trainers of every node are consecutive, as launchers start them by default, nothing changes and nothing is
    computed.

    Args:
        world: All ranks.
        config: The configuration.
        classes: Number of classes.
        chosen: The roles.
        hosts: The host of each rank of ``world``.

    Raises:
        RequestError: On all ranks, if the plan does not work for the model.
    """
    nodes = [hosts[rank] for rank in chosen.trainers]
    if in_blocks(nodes):
        return chosen
    # Rank 0 alone captures the model; `agree` makes its failure one of all ranks, which wait in the broadcast.
    order = world.broadcast_object(
        agree(world, lambda: _place_order(config, classes, nodes) if world.rank == 0 else None)
    )
    return replace(chosen, trainers=tuple(chosen.trainers[index] for index in order))


def _place_order(config: Config, classes: int, nodes: Sequence[str]) -> list[int]:
    """Return the order of ranks on nodes in which the least bytes go between nodes."""
    # `link_traffic` counts plans without cells only.
    plan = replace(config.plan.build(), cells=None, spill=None)
    program = ModelPrograms(config, classes).of(config.data.batch_size // plan.replicas // plan.microbatches)
    traffic = link_traffic(program, with_cuts(plan, program))
    order = rank_order(traffic, nodes)
    before, after = (traffic.between_nodes(names) for names in (nodes, [nodes[rank] for rank in order]))
    if after < before:
        say(
            f"ranks are not started node by node; in the order {_shown(order)} only {after / 1e6:.3g} MB of a step "
            f"leave a node instead of {before / 1e6:.3g} MB"
        )
    return list(order)


def _shown(order: Sequence[int]) -> str:
    first = ", ".join(map(str, order[:16]))
    return first if len(order) <= 16 else f"{first}, …"


def check_images(job: TrainingJob, programs: ModelPrograms) -> list[dict[str, Any]]:
    """Return the rows of ``coverage.csv``; reads every slide's tissue mask, so one rank does it for all.

    Args:
        job: The run.
        programs: Captures the run's model.

    Raises:
        RequestError: The model cannot be captured, or its outputs are not one for each class; an image would show too
            little of its slide's tissue, or a slide is damaged.
    """
    images = job.batches.batch_of(0) // job.plan.microbatches
    programs.of(images)  # first, because reading all tissue masks takes time
    for dataset in (job.train, job.val):
        dataset.check_files()
        check_coverage(dataset, job.config.data.min_coverage)
    trained_ids = {sample.slide_id for sample in job.train.samples}
    return [
        *job.train.coverage_table(),
        *(row for row in job.val.coverage_table() if row["slide_id"] not in trained_ids),
    ]


def drawn_by_stage(job: TrainingJob, device: str) -> InitialWeights | None:
    """Return initial weights of which each trainer draws those of its stages; None if it builds the whole model.

    A trainer builds the whole model if the model is the user's (its capture is verified with values), if weights are
    read from a file, on a GPU, and if the plan has one stage.
    """
    if not job.config.model.built_in or job.config.model.weights is not None or device != "cpu" or job.plan.stages == 1:
        return None
    return InitialWeights(lambda: build_model(job.model_json()["model"]), job.config.run.seed)


def make_model(
    job: TrainingJob, loads: bool, drawn: InitialWeights | None = None, tell: Callable[[str], None] = lambda line: None
) -> tuple[torch.nn.Module, Freezing | None]:
    """Return the initial model in the run's precision and memory format, ready for training, and what is frozen in it.

    Args:
        job: The run.
        loads: Whether to load ``model.weights`` and report it; False if another rank or a checkpoint provides them.
        drawn: Weights that ``make_engine`` draws later; the model is then on the meta device.
        tell: Called with lines about settings without effect, modules that stay in evaluation mode (see
            `set_training`) and frozen parts.
    """
    # Directly before building: initial weights depend on the seed alone, not on random numbers drawn earlier.
    torch.manual_seed(job.config.run.seed)
    recorded = job.model_json()
    described = recorded["model"]
    model = build_model(described) if drawn is None else drawn.model
    path = job.config.model.weights
    if path is not None and loads:
        say(f"weights from {path}: {load_weights(model, path)}")
        others = other_classes(path, recorded.get("class_names", ()))
        if others is not None:
            warn(others)
    run = job.config.run
    modes, freezing = set_training(model), freeze(model, job.config.model)
    for line in (unused_settings(described), other_normalisation(model, job.config.model), modes, freezing):
        if line is not None:
            tell(str(line))
    return convert_to_train(model, run.precision, run.memory_format), freezing


def device_of(request: DeviceRequest, roles: Roles) -> str:
    """Return the device of this rank; validators get GPUs that the trainers leave free (collective).

    Raises:
        RequestError: On all ranks, if ``cuda`` is requested and a node has too few GPUs for its trainers.
    """
    gpus = gpus_seen(roles.world)
    trainers = [gpus[rank] for rank in roles.trainer_ranks]
    validators = [gpus[rank] for rank in roles.validator_ranks]
    names = dict(zip(roles.trainer_ranks, assign_devices(request, trainers), strict=True))
    # Ranks of loaders stay on the CPU: they have no entry.
    names |= dict(zip(roles.validator_ranks, spare_devices(request, trainers, validators), strict=True))
    return names.get(roles.world.rank, "cpu")


def make_engine(
    job: TrainingJob,
    model: torch.nn.Module,
    plan: ParallelPlan,
    group: Communicator,
    batch: int,
    drawn: InitialWeights | None = None,
) -> Engine:
    """Return an engine for ``model`` over ``group``, for batches of ``batch`` images (collective over the group).

    Args:
        job: The run.
        model: From ``make_model``.
        plan: The plan of the trainers.
        group: The trainers.
        batch: Number of images of this rank's replica.
        drawn: What draws the model's weights if it is on the meta device.
    """
    optimizer = job.config.optimizer
    height, width = job.config.data.image_px
    engine = parallelize(
        model,
        (batch, 3, height, width),
        plan,
        group,
        loss=make_loss(job.task, optimizer.accumulate),
        loss_over=loss_over(job.task),
        optimizer=optimizer_factory(optimizer, model, job.step_samples),
        autocast=torch.bfloat16 if job.config.run.precision == "bfloat16" else None,
        memory_format="as_given",  # images and weights are in run.memory_format already
        release=True,
        compile=job.config.run.compile,
        cuda_graphs=job.config.run.cuda_graphs,
        verify=not job.config.model.built_in,  # built-in models are covered by tests
        weights=drawn,
    )
    # In the background, compiled code takes over at a step that depends on time: results would not repeat bit by bit.
    if engine.segments is not None and not job.config.run.deterministic:
        engine.segments.work_in_background()
    return engine


def make_evaluation_set(job: TrainingJob) -> EvaluationSet:
    """Return the evaluation set of the run."""
    run = job.config.run
    images = DatasetImages(job.val, job.normalisation, DTYPES[run.precision], FORMATS[run.memory_format])
    return EvaluationSet.of(images, job.val.samples, job.task, job.config.data.case_aggregate)


@dataclass(frozen=True)
class SavedRun:
    """The saved state of a run, opened and checked before anything is written.

    Attributes:
        checkpoint: Weights and buffers.
        training: Optimizer, random state and step.
        before: The configuration of the run until now.
    """

    checkpoint: Checkpoint
    training: TrainingState
    before: Config

    @classmethod
    def load(cls, job: TrainingJob, start: int, trainers: Communicator) -> SavedRun | None:
        """Open the checkpoint of step ``start``; None for a new run (0). Each trainer checks a share of its digests.

        Raises:
            RequestError: The checkpoint is damaged (the message names the file, and checkpoints that are whole), it is
                of a later step than the run's last, or the labels have changed, such as the classes.
        """
        if start == 0:
            return None
        if start > job.steps:
            # Otherwise the run's files would state fewer steps than its weights were trained for.
            raise RequestError(
                f"run.steps, run.epochs: given {job.steps} steps, but run {job.config.run.dir} has {start} already; "
                "give more, go back to an earlier checkpoint (--resume-from), or use another run.dir"
            )
        # By its step, not by the link ``latest``, because a network disk may show a node an earlier target of the link.
        folder, share = job.config.run.dir, (trainers.rank, trainers.size)
        path, config_before = step_folder(folder / "checkpoints", start), load_config(folder / "config.yaml")
        try:
            saved = cls(load_checkpoint(path, share), load_training_state(path, share), config_before)
        except RequestError as error:
            raise RequestError(f"{error}; {describe_way_out(folder / 'checkpoints', start)}") from error
        job.task.check_resumed(saved.checkpoint.model)
        return saved

    def check_groups(self, engine: EngineState, model: torch.nn.Module) -> None:
        """Check the optimizer's groups, before anything is written.

        Raises:
            RequestError: They are not those of the checkpoint.
        """
        try:
            check_groups(engine.optimizer, model.named_parameters(), self.training.optimizer)
        except RequestError as error:
            advice = "a run in which weight decay applied to norms and biases needs optimizer.decay_norms=true"
            raise RequestError(f"{error}; {advice}") from error

    def restore(self, engine: EngineState, model: torch.nn.Module) -> None:
        """Restore weights, optimizer and random state."""
        engine.load_state_dict(self.checkpoint.weights)
        engine.load_buffers(self.checkpoint.buffers or {})
        load_optimizer_state(engine.optimizer, model.named_parameters(), self.training.optimizer)
        restore_random(engine.random, self.training.state)

    def describe_norm_change(self, resumed: Config) -> str | None:
        """Return how batch norm changes with the configuration of the resumed run; None if it does not."""
        return describe_norm_change(self.before, resumed, int(self.training.state["step"]))

    def close(self) -> None:
        """Close the files once everything is restored, so that the checkpoint may be removed."""
        saved = self.checkpoint
        for tensors in (saved.weights, saved.averaged, saved.buffers, self.training.optimizer["tensors"]):
            if isinstance(tensors, StoredState):
                tensors.close()
