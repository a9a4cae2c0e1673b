"""``model.pt2`` and ``model.pt``: pixels to outputs for PyTorch alone, without the module's Python code.

PyTorch develops ``torch.export`` (pt2). TorchScript is deprecated; it is for programs that read nothing else, such as
some in C++ and Java.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from hyfi_core.errors import RequestError
from workflows.export_model.checked import first_line, largest_difference, sample_images
from workflows.export_model.exported import ExportSource, PixelModel

PT2, TORCHSCRIPT = "model.pt2", "model.pt"


def write_program(source: ExportSource, path: Path, size_px: tuple[int, int] | None) -> float:
    """Write a model to a file, and return the largest relative difference of its outputs from PyTorch's.

    The input is uint8 RGB (1, 3, H, W); the results are those of `PixelModel`. The file is checked on random pixels, of
    the given size, or of two sizes if it takes any.

    Args:
        source: The checkpoint.
        path: The file; its name, ``PT2`` or ``TORCHSCRIPT``, decides its format.
        size_px: Height and width of the image; None: any multiples of ``align_px``.

    Raises:
        RequestError: PyTorch cannot export the model, or the file computes something else.
    """
    model = PixelModel(source).eval()
    images = sample_images(source.align_px, size_px)
    # Loaded again for the check: what is compared is the file, not the program in memory.
    write, load = (_write_pt2, _load_pt2) if path.name == PT2 else (_write_torchscript, _load_torchscript)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated, which the command says
        try:
            write(model, images[0], path, size_px is None)
        except Exception as error:  # whatever the exporter meets in a user's forward
            advice = "; --size-px H,W exports it for one size" if size_px is None else "; use --to torch"
            reason = f"PyTorch cannot export this model to {path.name}: {first_line(error)}{advice}"
            raise RequestError(reason) from error
        program = load(path)
    return largest_difference(model, images, path.name, lambda image: program(image)[0].detach())


def _write_pt2(model: PixelModel, image: torch.Tensor, path: Path, any_size: bool) -> None:
    dynamic = torch.export.Dim.DYNAMIC
    shapes = ({2: dynamic, 3: dynamic},) if any_size else None
    torch.export.save(torch.export.export(model, (image,), dynamic_shapes=shapes), path)


def _load_pt2(path: Path) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    return torch.export.load(path).module()


def _write_torchscript(model: PixelModel, image: torch.Tensor, path: Path, any_size: bool) -> None:
    # The trace is checked by `largest_difference`, on two sizes.
    torch.jit.trace(model, image, check_trace=False).save(str(path))


def _load_torchscript(path: Path) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    program: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] = torch.jit.load(str(path))
    return program
