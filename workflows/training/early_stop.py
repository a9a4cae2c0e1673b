"""When to end a run whose weights do not get better any more.

::

    step of the weights     3     6     9    12    15
    auroc                 .71   .80   .79   .80   .78        patience 2: 9 and 12 are not better than 6,
                                             └─ the run ends with step 12

The decision names a step of weights. Where its result came late, training has gone on meanwhile; what was made after
that step is taken back, and results about later weights are not looked at. So the run ends with the same weights, the
same records and the same best checkpoint however late the results were, as if they had come at once. (With
``validation.policy: latest`` it depends on time which weights are validated at all; the rule holds for those.)
"""

from __future__ import annotations

from workflows.training.best import Records, merit


def last_step(records: Records, metric: str, patience: int | None) -> int | None:
    """Return the step with which the run ends, None while it goes on.

    Args:
        records: all validations so far, by step.
        metric: that decides; the loss decides between equals, as for the best checkpoint.
        patience: validations in a row that are not better than the best before them; None: for ever.
    """
    best: tuple[float, float] | None = None
    in_vain = 0
    for step in sorted(records):
        value = merit(records[step], metric)
        if best is None or value > best:
            best, in_vain = value, 0
        else:
            in_vain += 1
        if patience is not None and in_vain >= patience:
            return step
    return None
