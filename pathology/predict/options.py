"""How slides are predicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hyfi_core.errors import RequestError

Image = Literal["whole", "trained"]


@dataclass(frozen=True)
class PredictOptions:
    """How slides are predicted; checked when it is built.

    Attributes:
        mpp: micrometres per pixel of the images; None: the checkpoint's.
        slide_mpp: of slide files that do not state their own.
        overwrite: do finished slides again; replace what another checkpoint has left.
        cells: rows and columns in which one process computes every image; None: as large images need it.
        image: ``whole`` shows all tissue of a slide, ``trained`` what one image of the trained size holds.
        allow_partial: give a class also where less of the tissue was seen than the checkpoint asks for.

    Raises:
        RequestError: ``image`` is something else.
    """

    mpp: float | None = None
    slide_mpp: float | None = None
    overwrite: bool = False
    cells: tuple[int, int] | None = None
    image: Image = "whole"
    allow_partial: bool = False

    def __post_init__(self) -> None:
        if self.image not in get_args(Image):
            raise RequestError(f"--image {self.image}: {' or '.join(get_args(Image))} are expected")
