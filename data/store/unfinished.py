"""Where a slide is prepared before it has its name.

```
STORE/.<slide_id>.zarr.part-<digest>         of a known identity: the next writer of the same identity goes on there
STORE/.<slide_id>.zarr.tmp-<host>-<pid>      of no identity: gone with its process
```
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from data.files import remove_leftovers, temporary_beside
from data.store.shard import BESIDE


def unfinished_folder(final: Path, identity: list[Any] | None) -> Path:
    """Return where ``final`` is prepared; what is there of another identity, or of processes that died, is removed.

    Args:
        final: Name of the finished slide.
        identity: JSON of all that decides the slide's content; None: a new folder for this process.
    """
    remove_leftovers(final)
    prefix = f".{final.name}.part-"
    if identity is None:
        folder = temporary_beside(final)
        shutil.rmtree(folder, ignore_errors=True)
    else:
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        folder = final.with_name(f"{prefix}{digest[:16]}")
    for path in final.parent.iterdir():
        if path.name.startswith(prefix) and path != folder:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.rglob(f".*{BESIDE}*"):  # files that a kill cut off
        path.unlink(missing_ok=True)
    return folder
