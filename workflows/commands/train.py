"""``hyfi train``: checks the request, starts the ranks, and runs each in its role.

::

    run ──► launch                  a single process that starts the ranks and waits for them
     └────► train_rank ──► train_in ──► TrainingLoop.run, or the service of a loader or validator
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyfi_core.errors import RequestError
from hyfi_core.runtime.launch import inside_launcher
from workflows.config.load import Config, asks_for_plan, load_config
from workflows.console import progress, say, warn
from workflows.exit_codes import DONE, SOME_FAILED, STOPPED
from workflows.launch.resumption import Resumption

if TYPE_CHECKING:
    from hyfi_core.comm.base import Communicator
    from workflows.launch.owner import FolderOwner
    from workflows.launch.stop import StopFlag
    from workflows.training.checks.data_record import SlideTables
    from workflows.training.inputs.run_inputs import RunInputs
    from workflows.training.job import TrainingJob
    from workflows.training.loop import TrainingLoop
    from workflows.training.start import Roles, SavedRun

    RankBody = Callable[[bool], int]


@dataclass(frozen=True, kw_only=True)
class TrainArguments:
    """The arguments of ``hyfi train``.

    Attributes:
        config: The YAML of the run.
        overrides: ``section.key=value``, applied to it.
        ranks: Number of ranks; None: as many as the run needs; any other number is refused.
        resumption: Whether and where a run is continued; one that does not exist is started.
        as_json: Print the result as one JSON object.
    """

    config: Path
    overrides: Sequence[str] = ()
    ranks: int | None = None
    resumption: Resumption = field(default_factory=Resumption)
    as_json: bool = False

    def words(self, overrides: Sequence[str]) -> list[str]:
        """Return the command line of a rank, with all overrides."""
        flags = ["--json"] if self.as_json else []
        return ["train", str(self.config), *overrides, *self.resumption.words(), *flags]


def run(arguments: TrainArguments) -> int:
    """Train as a configuration says; starts ``mpiexec`` if it needs several ranks and there is no launcher.

    Returns:
        0 if all steps are done, 3 if stopped on request.

    Raises:
        RequestError: The request is not valid; nothing was written.
    """
    from workflows.launch.launch import launch, run_as_rank

    config, overrides, ranks = arguments.config, list(arguments.overrides), arguments.ranks
    resumption = arguments.resumption
    if inside_launcher() is None and asks_for_plan(config, overrides):
        from workflows.commands.plan import chosen_plan

        # The plan goes to the ranks as overrides, so that all of them, and a resumed run, have the same.
        overrides += chosen_plan(config, overrides, ranks, resumption.allowed)
    settings = load_config(config, overrides)
    if inside_launcher() is None:
        from workflows.launch.request import check_ranks, check_run, check_unused

        # Before the ranks start: importing torch and MPI on each takes seconds.
        check_ranks(settings, ranks if ranks is not None else settings.ranks)
        check_unused(settings)
        check_run(settings, resumption)
        if settings.ranks > 1:
            return launch(arguments.words(overrides), settings.ranks, settings.run.dir)
    return run_as_rank(partial(train_rank, settings, resumption, arguments.as_json))


def train_rank(config: Config, resumption: Resumption, as_json: bool) -> int:
    """Run this process as a rank of the launcher, or alone; return the exit code."""
    from workflows import signals

    # Before the imports below, which take seconds: a rank that a request interrupts there would leave the others
    # waiting.
    signals.remember_requests()

    from workflows.launch import rank_log
    from workflows.launch.launch import own_rank

    # Early, so that warnings while libraries are imported are kept, too.
    rank_log.begin(own_rank())

    from hyfi_core.arithmetic import set_arithmetic
    from workflows.interruption import how_to_continue
    from workflows.launch.compile_cache import keep_compiled, on_gpu
    from workflows.launch.peer_watch import expect_progress, join
    from workflows.launch.stop import StopFlag
    from workflows.launch.threads import set_threads

    # Before anything is computed: cuBLAS reads its setting when it is first used.
    set_arithmetic(config.run.tf32, config.run.deterministic)
    world = join()
    if config.run.compile == "on" or (config.run.compile == "auto" and on_gpu(config.run.device)):
        # Only where code is compiled, because this creates the folder.
        keep_compiled(config.run.compile_cache, warns=world.rank == 0)
    expect_progress(config.run.stall_s, partial(how_to_continue, config.run.dir))
    set_threads(world, config.run.threads)
    code = train_in(world, config, resumption, as_json, StopFlag(signals.requested))
    world.barrier()  # when one rank exits with a code other than 0, a launcher may kill ranks that still write
    return code


def train_in(world: Communicator, config: Config, resumption: Resumption, as_json: bool, stop: StopFlag) -> int:
    """Run as one rank of ``world``; return the exit code.

    Args:
        world: All ranks of the run.
        config: The configuration.
        resumption: Whether and where the run may be continued.
        as_json: Whether to print the result as one JSON object.
        stop: Requests to stop.

    Raises:
        RequestError: On all ranks if one of them refuses; nothing was written.
    """
    from hyfi_core.comm.agreement.agree import agree
    from hyfi_core.comm.agreement.shared_disk import agree_everywhere
    from workflows.launch import rank_log
    from workflows.launch.request import check_ranks, own_run
    from workflows.out_of_memory import remember_advice
    from workflows.training.checks.data_record import SlideTables
    from workflows.training.feeding import most_workers, share_chunks
    from workflows.training.inputs.of_job import inputs_of
    from workflows.training.job import prepare
    from workflows.training.pace import with_shares
    from workflows.training.start import Roles, SavedRun, device_of

    agree(world, lambda: check_ranks(config, world.size))
    # A stop may have been requested while the ranks started: check before the engine is built, which may take long.
    if stop.requested_on_any(world):
        return _stopped_at_start(world, config)
    start = _agreed_start(world, config, resumption)  # the step from which the run continues; 0: a new run
    _say_once(world, agree(world, lambda: share_chunks(config.data)))
    job = agree_everywhere(world, lambda: prepare(config))
    if world.rank == 0:
        _say_slides(job)
    inputs = inputs_of(job)
    coverage = agree(world, lambda: inputs.check() if world.rank == 0 else None)
    roles = Roles.of(world, config, inputs.outputs_to_place)  # roles.world: the same ranks, trainers first
    saved = agree(world, lambda: SavedRun.load(job, start, roles.trainers) if roles.trainers is not None else None)
    tables = agree(
        world, lambda: _slide_tables(job, saved, resumption, coverage) if roles.world.rank == 0 else SlideTables()
    )
    # Now with the shares of each batch, if replicas differ in speed.
    inputs.job = job = agree(world, lambda: with_shares(job, roles))
    device = device_of(config.run.device, roles)
    forecast = agree(world, lambda: inputs.check_memory(roles, device))
    for line in forecast:
        say(line)
    remember_advice(world.broadcast_object(inputs.advice(forecast)))
    most = most_workers(job, roles, device)  # collective: every rank calls it, whatever its role
    make_body = _maker_of_body(roles, most)
    body = agree(world, lambda: make_body(inputs, roles, saved, tables, stop, device))
    if stop.requested_on_any(world):
        return _stopped_at_start(world, config)
    # The first write, after all checks. Of several runs that start at the same moment, all but one are refused here.
    owner = _own_shared(world, lambda: own_run(config, resumption, start), config.run.dir)
    # Only into a folder that this run owns.
    rank_log.open_in(config.run.dir, f"{roles.describe()} on {device}")
    return _run_owned(roles, config, owner, lambda: body(as_json))


def _say_slides(job: TrainingJob) -> None:
    """Print how the labels match the store's slides, and which slides are left out."""
    from data.samples.exclusion import describe_excluded
    from data.store.unfinished import unfinished_note

    say(job.labels.describe())
    if note := unfinished_note(job.config.data.store):
        warn(note)
    if job.excluded:
        say(describe_excluded(job.excluded))


def _maker_of_body(roles: Roles, most: int | None) -> Callable[..., RankBody]:
    """Return the function that builds the body of this rank's role; ``most``: most decoding processes of a loader."""
    if roles.trainers is not None:
        return _trainer
    return partial(_loader, most) if roles.validators is None else _validator


def _run_owned(roles: Roles, config: Config, owner: FolderOwner | None, body: Callable[[], int]) -> int:
    """Run this rank's role, and release the folder; return the exit code of trainer 0 on every rank.

    A failed run also stops its loaders and validators, whose own exit codes would say "stopped on request".

    Raises:
        RunInterruptedError: Something outside of the run has ended it.
    """
    from workflows.interruption import RunInterruptedError, interruption

    try:
        # Loaders and validators end with a code of their own; the run has that of trainer 0.
        code: int = roles.world.broadcast_object(body())
        return code
    except (RequestError, OSError) as error:  # from one rank, after all have agreed: not an invalid request
        reason = interruption(error, config)
        if reason is None:
            raise
        raise RunInterruptedError(reason) from error
    finally:
        if owner is not None:
            owner.release()


def _slide_tables(
    job: TrainingJob, saved: SavedRun | None, resumption: Resumption, coverage: Sequence[Mapping[str, Any]] | None
) -> SlideTables:
    """Return the record of the run's slides; on resume, compare them with the slides of the checkpoint."""
    from data.samples.trained.trained_slides import TrainedSlides
    from workflows.training.checks.data_record import SlideTables, check_data, data_record

    record, trained = data_record(job), TrainedSlides.of(job.train)
    if saved is not None:
        note = check_data(job, saved.training.state, record, resumption.accepts_changes)
        if note is not None:
            say(note)
        # Also slides that only earlier parts of the run had: their labels are in the weights.
        trained = TrainedSlides.union((trained, TrainedSlides.of_json(saved.checkpoint.model.get("trained_on"))))
    return SlideTables(coverage, record, trained)


def _agreed_start(world: Communicator, config: Config, resumption: Resumption) -> int:
    """Return the step after which rank 0 continues the run, once all ranks can read its checkpoint (collective)."""
    from hyfi_core.comm.agreement.agree import agree
    from hyfi_core.comm.agreement.shared_disk import agree_everywhere
    from workflows.launch.request import check_checkpoint, check_run, check_unused, describe_missing_run

    # First: another process that runs in the folder could remove the checkpoint while it is read.
    agree(world, lambda: check_unused(config) if world.rank == 0 else None)
    # Printed only after the checks: if they refuse, the error is the only message.
    missing = describe_missing_run(config) if resumption.allowed and world.rank == 0 else None
    start: int = world.broadcast_object(agree_everywhere(world, lambda: check_run(config, resumption)))
    agree_everywhere(world, lambda: check_checkpoint(config, start))
    if missing is not None:
        text, is_warning = missing
        warn(f"hyfi: {text}") if is_warning else say(text)
    note = resumption.describe(config.run.dir, start) if world.rank == 0 else None
    if note is not None:
        say(note)
    return start


def _own_shared(world: Communicator, own: Callable[[], FolderOwner], folder: Path) -> FolderOwner | None:
    """Let rank 0 lock the run's folder, and check that all ranks see the same one (collective).

    Returns:
        The owner on rank 0, None on other ranks.
    """
    from hyfi_core.comm.agreement.agree import agree
    from hyfi_core.comm.agreement.shared_disk import require_shared

    owner = agree(world, lambda: own() if world.rank == 0 else None)
    try:
        require_shared(world, folder, f"run.dir {folder}")
    except RequestError:
        if owner is not None:
            # The folder is not the one that the others see: leave nothing in it.
            owner.withdraw()
        raise
    return owner


def _say_once(world: Communicator, note: str | None) -> None:
    """Let rank 0 print the notes of all ranks as warnings, each text once (collective)."""
    for text in sorted({text_of_rank for text_of_rank in world.gather_objects(note) or () if text_of_rank is not None}):
        warn(f"hyfi: {text}")


def _stopped_at_start(world: Communicator, config: Config) -> int:
    if world.rank == 0:
        say(f"run {config.run.dir}: stopped on request before the first step; nothing was written")
    return STOPPED


def _trainer(
    inputs: RunInputs, roles: Roles, saved: SavedRun | None, slides: SlideTables, stop: StopFlag, device: str
) -> RankBody:
    """Build the engine and return the function that trains with it, and returns the exit code (collective)."""
    from hyfi_core.comm.agreement.agree import agree
    from workflows.training.averages.of_run import check_average
    from workflows.training.loggers.run_loggers import check_loggers
    from workflows.training.loop import TrainingLoop
    from workflows.training.recorder import Recorder
    from workflows.training.run_report import describe_start, report
    from workflows.training.saving.run_folder import RunFolder
    from workflows.training.throughput import peak_flops_per_s

    assert roles.trainers is not None
    job = inputs.job
    is_rank_0 = roles.world.rank == 0  # alone reads files, prints and writes
    # One rank reads the file of run.machine, and all are refused together.
    peak = agree(roles.trainers, lambda: peak_flops_per_s(job.config, job.plan.ranks, device) if is_rank_0 else None)
    tell = say if is_rank_0 else lambda line: None
    # Rank 0 reads the file of weights, unless a checkpoint replaces them.
    model, freezing = agree(roles.trainers, lambda: inputs.make_model(device, is_rank_0 and saved is None, tell))
    engine = inputs.make_engine(model, roles)
    agree(roles.trainers, lambda: check_average(job.config.run.ema, engine))
    # Loggers run on rank 0 alone.
    agree(roles.trainers, lambda: check_loggers(job.config.run.loggers) if is_rank_0 else None)
    if saved is not None:
        agree(roles.trainers, lambda: saved.check_groups(engine, model))
    inputs.reserve(engine, model, roles)  # refused before anything is written
    changed_result = None if saved is None else inputs.describe_change(saved, engine)
    throughput = inputs.throughput(engine, peak, device) if is_rank_0 else None

    def body(as_json: bool) -> int:
        """Train; rank 0 records and reports. Return the exit code."""
        start = saved.training.state["step"] if saved is not None else 0
        # Only rank 0 has a throughput, and so a recorder.
        recorder = Recorder(job, engine.plan, start, slides, throughput) if throughput is not None else None
        if is_rank_0:
            say(describe_start(job, engine, start))
            RunFolder(job.config.run.dir).write_state("running", job.steps)
            for warning in [*inputs.warnings(engine), *([] if changed_result is None else [changed_result])]:
                warn(f"hyfi: {warning}")
        loop = TrainingLoop(inputs, roles, engine, model, freezing, recorder, saved, stop)
        if recorder is None:
            return _code(loop, loop.run(lambda: None))
        with progress(job.steps, "train", finished=start) as bar:
            stopped = loop.run(lambda: bar.advance(1, recorder.line()))
        # Before the report, whose `status.json` says that the run is done.
        recorder.close()
        report(job, recorder, stopped, loop.failure, as_json)
        return _code(loop, stopped)

    return body


def _code(loop: TrainingLoop, stopped: bool) -> int:
    """Return the exit code of a run; a failed one counts as stopped, too."""
    if loop.failure is not None:
        return SOME_FAILED
    return STOPPED if stopped else DONE


def _loader(
    most: int | None,
    inputs: RunInputs,
    roles: Roles,
    saved: SavedRun | None,
    slides: SlideTables,
    stop: StopFlag,
    device: str,
) -> RankBody:
    """Build the loader service with at most ``most`` decoding processes; return the function that runs it.

    ``saved``, ``slides`` and ``device`` are for trainers: all roles get the same arguments.
    """
    from workflows.training.feeding import make_loader

    check_signals = partial(stop.forward, roles.world)
    service = make_loader(inputs.job, inputs.loader_samples(), roles, check_signals, most)
    return lambda _: STOPPED if service.serve() else DONE


def _validator(
    inputs: RunInputs, roles: Roles, saved: SavedRun | None, slides: SlideTables, stop: StopFlag, device: str
) -> RankBody:
    """Start the validation service and return the function that runs it.

    ``saved`` and ``slides`` are for trainers: all roles get the same arguments.
    """
    from workflows.evaluation.validation_child import start_child, validation_plan
    from workflows.evaluation.validator import ValidationService

    job, group = inputs.job, roles.validators
    assert group is not None
    plan = validation_plan(job.config, job.plan, group.size)
    start = partial(start_child, inputs.model_json(), job.config, job.val.samples, plan, device=device)
    service = ValidationService(roles.world, group, start, check_signals=lambda: stop.forward(roles.world))
    service.begin()
    return lambda _: STOPPED if service.serve() else DONE
