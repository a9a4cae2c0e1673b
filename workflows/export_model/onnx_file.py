"""``model.onnx``: pixels to outputs, checked against PyTorch by onnxruntime before it is kept."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyfi_core.errors import RequestError
from workflows.export_model.checked import TOLERANCE, first_line, largest_difference, sample_images
from workflows.export_model.exported import ExportSource, PixelModel

FILE_NAME = "model.onnx"


def write_onnx(source: ExportSource, path: Path, size_px: tuple[int, int] | None) -> float:
    """Write a model to an ONNX file and return the largest relative difference of its outputs from PyTorch's.

    The input ``pixels`` is uint8 RGB (1, 3, H, W). The file is checked on random pixels: of the given size, or of two
    sizes if it takes any.

    Args:
        source: The checkpoint.
        path: The file.
        size_px: Height and width of the image; None: any multiples of ``align_px``.

    Raises:
        RequestError: Packages are missing, PyTorch cannot export the model, or the file computes something else.
    """
    _require_packages()
    model = PixelModel(source).eval()
    images = sample_images(source.align_px, size_px)
    dynamic = torch.export.Dim.DYNAMIC
    shapes = {"pixels": {2: dynamic, 3: dynamic}} if size_px is None else None
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of packages that the model does not use
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.onnx.export(
                model,
                (images[0],),
                dynamo=True,
                input_names=["pixels"],
                output_names=model.output_names,
                dynamic_shapes=shapes,
                verbose=False,
            )
        except Exception as error:  # whatever the exporter meets in a user's forward
            advice = "; --size-px H,W exports it for one size" if size_px is None else ""
            raise RequestError(f"PyTorch cannot export this model to ONNX: {first_line(error)}{advice}") from error
    assert program is not None
    program.save(str(path))
    return largest_difference(model, images, "the ONNX file", lambda image: _computed(path, image))


def checked_export(
    module: nn.Module, path: Path, samples: list[torch.Tensor], names: tuple[str, str], dynamic: dict[int, Any]
) -> float:
    """Write a module of one input and one output to an ONNX file; return the largest relative difference on samples.

    Args:
        module: The module.
        path: The file.
        samples: Inputs; the first is traced, all are checked.
        names: Names of the input and the output.
        dynamic: Dims of the input that may vary.

    Raises:
        RequestError: Packages are missing, PyTorch cannot export the module, or the file computes something else.
    """
    _require_packages()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            program = torch.onnx.export(
                module.eval(),
                (samples[0],),
                dynamo=True,
                input_names=[names[0]],
                output_names=[names[1]],
                dynamic_shapes=(dynamic,),
                verbose=False,
            )
        except Exception as error:  # whatever the exporter meets in a user's forward
            raise RequestError(f"PyTorch cannot export {path.name}: {first_line(error)}; use --to torch") from error
    assert program is not None
    program.save(str(path))
    return max(_difference_of(module, path, sample, names) for sample in samples)


def _difference_of(module: nn.Module, path: Path, sample: torch.Tensor, names: tuple[str, str]) -> float:
    """Return the largest difference of the file's outputs from the module's, relative to the largest output.

    Args:
        module: The exported module.
        path: The ONNX file.
        sample: An input.
        names: Of the file's input and output.

    Raises:
        RequestError: The difference is larger than ``TOLERANCE``.
    """
    import onnxruntime

    session: Any = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    computed = torch.from_numpy(session.run([names[1]], {names[0]: sample.numpy()})[0])
    with torch.no_grad():
        outputs = module(sample)
    difference = float((computed - outputs).abs().max() / outputs.abs().max().clamp_min(1e-6))
    if not difference <= TOLERANCE:  # NaN, too
        raise RequestError(
            f"{path.name} computes other {names[1]} than PyTorch (relative difference {difference:.2g}); no file is "
            f"kept"
        )
    return difference


def _require_packages() -> None:
    """Refuse an export if a package that it needs is missing."""
    from importlib.util import find_spec

    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise RequestError(f"--to onnx needs {', '.join(missing)}: pip install 'hyfi[onnx]'")


def _computed(path: Path, image: torch.Tensor) -> torch.Tensor:
    """Return the outputs that an ONNX file computes for an image."""
    import onnxruntime

    session: Any = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["outputs"], {"pixels": image.numpy()})[0])
