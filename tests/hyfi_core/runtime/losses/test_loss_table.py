"""Ten losses, of which seven are no mean over samples, on all kinds of plans: as one process with the whole batch."""

from __future__ import annotations

import pytest

from tests.hyfi_core.runtime.losses.reference import LOSSES, PLANS, assert_loss_of_whole_batch

QUICK = [(list(LOSSES)[(3 * number + 1) % len(LOSSES)], plan) for number, plan in enumerate(PLANS)]
"""Each plan with one loss, each loss with two or three plans."""


@pytest.mark.parametrize(("loss", "plan"), QUICK)
def test_the_loss_is_that_of_the_whole_batch(loss: str, plan: str) -> None:
    assert_loss_of_whole_batch(*LOSSES[loss], PLANS[plan])


@pytest.mark.soak
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_on_every_plan(loss: str, plan: str) -> None:
    for microbatch in (1, 2):
        if microbatch == 1 and PLANS[plan].shares is None and PLANS[plan].microbatches * PLANS[plan].replicas == 1:
            continue
        assert_loss_of_whole_batch(*LOSSES[loss], PLANS[plan], microbatch=microbatch)
