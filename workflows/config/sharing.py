"""What a run whose spare ranks train, too, must fulfil: ``roles.design: offload_naive``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workflows.config.run import Config


def check_sharing(config: Config) -> None:
    """Check that every replica, of the plan's ranks or of spare ones, can have a share of each batch.

    How many spare ranks there are is not known here where hosts decide it.

    Raises:
        ValueError: something of it does not fit the rest; names the key, what was given and what is allowed.
    """
    plan, roles, batch = config.plan, config.roles, config.data.batch_size
    of_one, rounds, known = plan.ranks // plan.replicas, plan.microbatches, not isinstance(roles.spare, str)
    replicas = config.trainers // of_one
    if config.trainers % of_one:
        raise ValueError(
            f"roles.spare: given {roles.spare}; allowed: a multiple of {of_one}, the ranks of a replica (plan)"
        )
    if config.model.norm == "train" and not plan.sync_batch_norm:
        raise ValueError(
            "roles.design: given offload_naive: speed decides how many slides a replica has, and with batch norms of "
            "each replica alone that would change the result; allowed: with plan.sync_batch_norm=true, or with "
            "model.norm=group or frozen"
        )
    if batch % rounds or batch < replicas * rounds:
        raise ValueError(
            f"data.batch_size: given {batch}; allowed: a multiple of plan.microbatches = {rounds}, from "
            f"{replicas * rounds}: each of {replicas} replicas, however slow, takes a slide of each micro-batch"
        )
    shares = roles.shares or ()
    wrong = sum(shares) != batch or any(share % rounds for share in shares) or (known and len(shares) != replicas)
    if shares and wrong:
        raise ValueError(
            f"roles.shares: given {list(shares)}; allowed: a multiple of plan.microbatches = {rounds} for each of "
            f"{replicas if known else 'the'} replicas, together data.batch_size = {batch}"
        )
