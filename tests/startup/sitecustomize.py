"""Python imports this first in each process that has this folder on PYTHONPATH: ranks that are programs of tests.

The commands of ``hyfi`` start quickly by themselves; tests run these as users do, without this folder.
"""

import gc

from hyfi_core.collection import start_quickly

start_quickly()
gc.set_threshold(20_000, 20, 20)  # as in the tests' own process
