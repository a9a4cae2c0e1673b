"""How long tests wait."""

from __future__ import annotations

PATIENCE_S = 240.0
"""How long a test waits for what must come: seconds on a quiet machine, minutes where forty processes share two cores.

It is below the limit of pytest itself (600 s), so that the test says what did not come."""

SOON_S = 45.0
"""Within this time a test expects what is promised within seconds; a hang would last for minutes."""

BEFORE_KILLED_S = 25.0
"""As ``SOON_S`` under torchrun and Slurm, which kill by themselves what has not ended after thirty seconds."""
