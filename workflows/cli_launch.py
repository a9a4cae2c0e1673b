"""The options of ``hyfi launch …``; implemented in :mod:`workflows.commands.launch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from workflows.exit_codes import exit_code_of

launch = typer.Typer(
    name="launch",
    help="Write (and submit) a script that starts a run, an ingest or a prediction on a cluster.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Config = Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The run's YAML.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[section.key=value]", help="Values that override the file's.")
]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="Nodes of the job.")]
Gpus = Annotated[int | None, typer.Option("--gpus-per-node", min=1, help="GPUs of each node.")]
Cpus = Annotated[int | None, typer.Option("--cpus-per-task", min=1, help="CPU cores of each rank.")]
Time = Annotated[str | None, typer.Option("--time", metavar="HH:MM:SS", help="Time limit, in Slurm's format.")]
Partition = Annotated[str | None, typer.Option("--partition", help="Default: the site's.")]
Mpi = Annotated[str | None, typer.Option("--mpi", help="Value of srun --mpi: pmi2 (MPICH), pmix (Open MPI).")]
Ranks = Annotated[
    int | None, typer.Option("--ranks", min=1, help="Number of ranks; required if roles are given by host.")
]
RoleNodes = Annotated[
    int,
    typer.Option(
        "--role-nodes", min=0, help="Further nodes, of another kind, for roles given by host (a heterogeneous job)."
    ),
]
RoleRanks = Annotated[
    int | None, typer.Option("--role-ranks", min=1, help="Ranks on all role nodes together; default: one on each.")
]
RolePartition = Annotated[
    str | None, typer.Option("--role-partition", help="Partition of the role nodes; default: the site's.")
]
SiteFile = Annotated[
    Path | None, typer.Option("--site", metavar="site.yaml", help="Settings of this cluster; default: ./site.yaml.")
]
Script = Annotated[Path | None, typer.Option("--script", help="Where to write the script.")]
Submit = Annotated[bool, typer.Option("--submit", help="Submit the script to Slurm.")]
Json = Annotated[bool, typer.Option("--json", help="Print one machine-readable object last on standard output.")]


@launch.command()
def slurm(
    config: Config,
    overrides: Overrides = None,
    nodes: Nodes = 1,
    gpus_per_node: Gpus = None,
    cpus_per_task: Cpus = None,
    time: Time = None,
    partition: Partition = None,
    mpi: Mpi = None,
    ranks: Ranks = None,
    role_nodes: RoleNodes = 0,
    role_ranks: RoleRanks = None,
    role_partition: RolePartition = None,
    site: SiteFile = None,
    script: Script = None,
    submit: Submit = False,
    as_json: Json = False,
) -> None:
    """Write a Slurm job that trains, saves before its time limit, requeues itself and continues."""

    def body() -> int:
        from workflows.commands.launch import ScriptOptions, run
        from workflows.launch.scripts import Resources

        resources = Resources(
            nodes,
            gpus_per_node,
            cpus_per_task,
            time,
            partition,
            mpi,
            role_nodes=role_nodes,
            role_ranks=role_nodes if role_ranks is None else role_ranks,  # one on each of their nodes
            role_partition=role_partition,
        )
        options = ScriptOptions(resources, site, script, submit, as_json)
        return run("slurm", config, list(overrides or ()), ranks, options)

    raise typer.Exit(exit_code_of(body))


@launch.command("slurm-array", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def slurm_array(
    context: typer.Context,
    parts: Annotated[
        int | None, typer.Option("--parts", min=1, help="Number of jobs in the array, 4 by default; not of folds.")
    ] = None,
    cpus_per_task: Cpus = None,
    time: Time = None,
    partition: Partition = None,
    site: SiteFile = None,
    script: Script = None,
    submit: Submit = False,
    as_json: Json = False,
) -> None:
    """Write a Slurm array for an ingest, a prediction or folds: slurm-array --parts 8 ingest PATH… --out STORE."""
    _check_words(context, list(context.args))

    def body() -> int:
        from workflows.commands.launch import ScriptOptions, run_array
        from workflows.launch.scripts import Resources

        resources = Resources(1, None, cpus_per_task, time, partition)
        options = ScriptOptions(resources, site, script, submit, as_json)
        return run_array(list(context.args), parts, options)

    raise typer.Exit(exit_code_of(body))


def _check_words(context: typer.Context, words: list[str]) -> None:
    """Check that ``hyfi`` accepts the words of each job: otherwise a wrong option would show only when the jobs run.

    Raises:
        typer.BadParameter: After a ``--`` among the words, the ``--part`` that the script adds would be a path.
    """
    root = context.find_root()
    if not words or words[0] not in ("ingest", "predict") or "--part" in words:
        return  # `run_array` refuses these, and names what is allowed
    assert isinstance(root.command, typer.core.TyperGroup)
    command = root.command.commands[words[0]]
    # Raises a usage error, which names the command.
    parsed = command.make_context(words[0], [*words[1:], "--part", "1/2"], parent=root)
    if parsed.params.get("part", "1/2") != "1/2":
        raise typer.BadParameter("give all options before the paths, without --", ctx=parsed)


@launch.command()
def local(
    config: Config,
    overrides: Overrides = None,
    site: SiteFile = None,
    script: Script = None,
    as_json: Json = False,
) -> None:
    """Write a shell script that starts a training run on this machine; ``hyfi`` starts the ranks itself."""

    def body() -> int:
        from workflows.commands.launch import ScriptOptions, run
        from workflows.launch.scripts import Resources

        return run(
            "local", config, list(overrides or ()), None, ScriptOptions(Resources(), site, script, as_json=as_json)
        )

    raise typer.Exit(exit_code_of(body))


def _add_script_command(by: Literal["mpiexec", "torchrun"], about: str) -> None:
    """Add a command that writes a shell script around the launcher ``by``."""

    def command(
        config: Config,
        overrides: Overrides = None,
        nodes: Nodes = 1,
        ranks: Ranks = None,
        site: SiteFile = None,
        script: Script = None,
        as_json: Json = False,
    ) -> None:
        def body() -> int:
            from workflows.commands.launch import ScriptOptions, run
            from workflows.launch.scripts import Resources

            options = ScriptOptions(Resources(nodes), site, script, as_json=as_json)
            return run(by, config, list(overrides or ()), ranks, options)

        raise typer.Exit(exit_code_of(body))

    launch.command(by, help=about)(command)


_add_script_command("mpiexec", "Write a shell script that starts a training run with mpiexec.")
_add_script_command(
    "torchrun", "Write a shell script that starts a training run with torchrun (NCCL with GPUs, gloo without)."
)
