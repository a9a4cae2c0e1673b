"""``hyfi export-model``: a trained model for use elsewhere, with a card that says what it is."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hyfi_core.errors import RequestError
from workflows.console import emit_json, say, warn
from workflows.exit_codes import DONE
from workflows.paths import require_local

if TYPE_CHECKING:
    from workflows.export_model.exported import ExportSource

FORMATS = ("torch", "onnx", "pt2", "torchscript")


def run(checkpoint: Path, to: str, out: Path, size_px: tuple[int, int] | None, as_json: bool) -> int:
    """Write a checkpoint's model into ``out``.

    Args:
        checkpoint: Folder of the checkpoint.
        to: ``torch``: weights and a script; other formats: one file that computes outputs from pixels.
        out: Folder to make; it appears when it is complete.
        size_px: Height and width of the images that the file takes; None: any.
        as_json: Print the files as one JSON object.

    Raises:
        RequestError: The checkpoint or the request cannot be used; nothing is written.
    """
    if to not in FORMATS:
        raise RequestError(f"--to {to}: expected one of {', '.join(FORMATS)}")
    if size_px is not None and to == "torch":
        raise RequestError("--size-px is for --to onnx, pt2 and torchscript; --to torch takes images of any size")
    require_local(checkpoint, "checkpoint")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RequestError(f"{out} exists; choose another --out, or remove it")
    from data.samples.colours.stain_normalisation import StainNormalisation
    from workflows.export_model.exported import ExportSource
    from workflows.export_model.model_card import FILE_NAME, write_card

    checkpoint = checkpoint.resolve()  # the card names the step, not the link best or latest
    source = ExportSource.load(checkpoint)
    if size_px is not None and any(side % source.align_px for side in size_px):
        raise RequestError(
            f"--size-px {size_px[0]},{size_px[1]}: expected multiples of {source.align_px} (data.align_px)"
        )
    if size_px is not None and source.of_bags:
        raise RequestError("--size-px is for models of whole images; tiles have the size that they had in training")
    if to in ("pt2", "torchscript") and source.of_bags:
        raise RequestError(f"--to {to} is for models of whole images; use --to torch or --to onnx")
    temporary = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        files, difference = _write(source, to, temporary, size_px)
        write_card(source, checkpoint, temporary, [*files, (FILE_NAME, "this card")])
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except OSError as error:
        raise RequestError(f"{out}: cannot be written ({error.strerror or error}); choose another --out") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    names = [name for name, _ in files] + [FILE_NAME]
    checked = f"; outputs differ from PyTorch's by {difference:.1g} at most" if difference is not None else ""
    say(f"{out}: {', '.join(names)}{checked}")
    if to == "torchscript":
        warn("hyfi: PyTorch has deprecated TorchScript; --to pt2 writes what takes its place")
    stain = StainNormalisation.from_json(source.config.get("stain_normalisation"))
    if stain is not None:
        warn(
            f"hyfi: the model takes pixels after stain normalisation ({stain.method}), which measures whole slides and "
            f"is not in these files; without it, results differ; `hyfi predict` does it"
        )
    if as_json:
        emit_json({"out": str(out), "files": [str(out / name) for name in names]})
    return DONE


def _write(
    source: ExportSource, to: str, folder: Path, size_px: tuple[int, int] | None
) -> tuple[list[tuple[str, str]], float | None]:
    """Write a model's files.

    Returns:
        ([(name, description) of each file], largest difference between the file's outputs and PyTorch's); the
        difference is None for ``torch``, whose files compute nothing.
    """
    from workflows.export_model.bag_folder import write_bag_onnx, write_bag_torch
    from workflows.export_model.onnx_file import FILE_NAME, write_onnx
    from workflows.export_model.program_file import PT2, TORCHSCRIPT, write_program
    from workflows.export_model.torch_folder import MODEL_JSON, SCRIPT, WEIGHTS, write_torch

    if source.of_bags:
        return write_bag_onnx(source, folder) if to == "onnx" else (write_bag_torch(source, folder), None)
    if to == "torch":
        write_torch(source, folder)
        return [(WEIGHTS, "weights"), (MODEL_JSON, "what the model is"), (SCRIPT, f"`python {SCRIPT} IMAGE`")], None
    shape = "any multiples" if size_px is None else f"{size_px[0]} × {size_px[1]}, multiples"
    takes = f"pixels: uint8 RGB (1, 3, H, W), H and W {shape} of {source.align_px}; outputs and more"
    if to == "onnx":
        return [(FILE_NAME, takes)], write_onnx(source, folder / FILE_NAME, size_px)
    name = PT2 if to == "pt2" else TORCHSCRIPT
    loading = "torch.export.load(FILE).module()" if to == "pt2" else "torch.jit.load(FILE)"
    return [(name, f"`{loading}`; {takes}")], write_program(source, folder / name, size_px)
