"""Exports of models with bags: an encoder of tiles and its aggregator, or an aggregator of features alone.

::

    torch    model.safetensors, model.json, predict.py     updates of LoRA are merged into the weights
    onnx     encoder.onnx      pixels uint8 (n, 3, T, T)  -> vectors (n, D)      any n
             aggregator.onnx   vectors (N, D)             -> outputs (1, K)      any N
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from hyfi_core.errors import RequestError
from hyfi_core.tiles.model import TileModel
from workflows.encoders.lora import merge_lora
from workflows.export_model.exported import ExportSource
from workflows.export_model.onnx_file import checked_export
from workflows.export_model.torch_folder import MODEL_JSON, SCRIPT, WEIGHTS

ENCODER, AGGREGATOR = "encoder.onnx", "aggregator.onnx"
_MERGED_TOLERANCE = 1e-4
"""Largest difference that merging may make to a vector, relative to its largest value: rounding of float32."""
_TILES = 3
_BAG = (5, 9)
"""Numbers of vectors in the bags that check an aggregator's file."""

_TILES_SCRIPT = '''"""Predict one slide of its tissue tiles: python {script} FOLDER.

Tiles are PNG, {size} x {size} px of {mpp:g} micrometres.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from data.loading.normalise import Normalisation
from workflows.evaluation.tile_models import build_tile_model
from workflows.tasks.by_name import readout_of

HERE = Path(__file__).parent
config = json.loads((HERE / "{model_json}").read_text(encoding="utf-8"))
model, _ = build_tile_model(config["model"], {size}, None, Normalisation.from_json(config["normalisation"]))
model.load_state_dict(load_file(HERE / "{weights}"))
model.eval()

pictures = [np.array(Image.open(path).convert("RGB")) for path in sorted(Path(sys.argv[1]).glob("*.png"))]
with torch.no_grad():
    tiles = [torch.from_numpy(picture).permute(2, 0, 1)[None] / 255 for picture in pictures]
    vectors = torch.cat([model.encoder(tile) for tile in tiles])
'''
_FEATURES_SCRIPT = '''"""Predict one slide: python {script} FILE, features of hyfi features, TRIDENT, CLAM or STAMP."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from data.tiles.features.stored import StoredFeatures
from workflows.evaluation.feature_models import build_feature_model
from workflows.tasks.by_name import readout_of

HERE = Path(__file__).parent
config = json.loads((HERE / "{model_json}").read_text(encoding="utf-8"))
model = build_feature_model(config["model"])
model.load_state_dict(load_file(HERE / "{weights}"))
model.eval()

with torch.no_grad():
    vectors = torch.from_numpy(StoredFeatures.of(Path(sys.argv[1])).vectors())
'''
_REST = """    returned = model.aggregator(vectors)
outputs = (returned[0] if isinstance(returned, tuple) else returned).reshape(-1)
readout = readout_of(config)
for name, value in zip(readout.columns, readout.values(outputs.double().numpy()).tolist()):
    print(f"{name}: {value:.6g}")
"""


def write_bag_torch(source: ExportSource, folder: Path) -> list[tuple[str, str]]:
    """Write weights, ``model.json`` and a script that predicts a slide; return (name, description) of each file.

    Raises:
        RequestError: Merging the updates of LoRA changes the encoder's vectors.
    """
    model, config = _with_merged_lora(source), source.config
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    (folder / WEIGHTS).write_bytes(save(weights))
    # Names of slides are not for others; `files` has digests of files that are not exported.
    exported = {name: value for name, value in config.items() if name not in ("files", "trained_on")}
    # The weights are merged: what is built from the file must have no updates.
    if "encoder" in exported["model"]:
        exported["model"] = exported["model"] | {"encoder": exported["model"]["encoder"] | {"lora": None}}
    (folder / MODEL_JSON).write_text(json.dumps(exported, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    tiles = bool(config.get("tiles"))
    size = int(config["tiles"]["size_px"]) if tiles else 0
    head = (_TILES_SCRIPT if tiles else _FEATURES_SCRIPT).format(
        script=SCRIPT, size=size, mpp=float(config["mpp"]), model_json=MODEL_JSON, weights=WEIGHTS
    )
    (folder / SCRIPT).write_text(head + _REST, encoding="utf-8")
    usage = f"`python {SCRIPT} FOLDER` of a slide's tiles" if tiles else f"`python {SCRIPT} FILE` of a slide's features"
    return [(WEIGHTS, "weights"), (MODEL_JSON, "what the model is"), (SCRIPT, usage)]


def write_bag_onnx(source: ExportSource, folder: Path) -> tuple[list[tuple[str, str]], float]:
    """Write the files of encoder and aggregator.

    Returns:
        ([(name, description) of each file], largest relative difference of their outputs from PyTorch's).

    Raises:
        RequestError: PyTorch cannot export one of them, or a file computes something else.
    """
    model, config = _with_merged_lora(source).float(), source.config
    files, differences = [], []
    any_count = {0: torch.export.Dim.DYNAMIC}  # dim 0 may vary: the number of tiles, or of vectors
    if config.get("tiles"):
        size = int(config["tiles"]["size_px"])
        samples = [_pixels(count, size) for count in (_TILES, _TILES + 1)]
        differences.append(
            checked_export(_OnPixels(model.encoder), folder / ENCODER, samples, ("pixels", "vectors"), any_count)
        )
        files.append((ENCODER, f"pixels: uint8 RGB (n, 3, {size}, {size}); vectors (n, D)"))
    features = _features(source, model)
    bags = [torch.randn(count, features, generator=torch.Generator().manual_seed(count)) for count in _BAG]
    # Two sizes of bags: a graph that was traced with a fixed number would fail on the second.
    head = _Outputs(model.aggregator)
    differences.append(checked_export(head, folder / AGGREGATOR, bags, ("vectors", "outputs"), any_count))
    files.append((AGGREGATOR, f"vectors: float32 (N, {features}), of all tiles of a slide; outputs (1, K)"))
    return files, max(differences)


def _with_merged_lora(source: ExportSource) -> TileModel:
    """Merge updates of LoRA into the weights of the source's model, in place, and return it.

    Raises:
        RequestError: Merging changes the encoder's vectors of random tiles.
    """
    model = source.member.model
    assert isinstance(model, TileModel)
    if source.config.get("features") or source.config["model"]["encoder"].get("lora") is None:
        return model
    tiles = (_pixels(_TILES, int(source.config["tiles"]["size_px"])) / 255).to(next(model.parameters()).dtype)
    with torch.no_grad():
        before = model.encoder(tiles)
        merge_lora(model)
        after = model.encoder(tiles)
    difference = float((before - after).abs().max() / before.abs().max().clamp_min(1e-6))
    # `not <=`, so that NaN is refused, too.
    if not difference <= _MERGED_TOLERANCE:
        raise RequestError(f"updates of LoRA cannot be merged: vectors differ by {difference:.2g}; nothing is written")
    return model


def _features(source: ExportSource, model: TileModel) -> int:
    """Return the length of a vector: as the features state, or as the encoder returns for one tile."""
    if source.config.get("features"):
        return int(source.config["features"]["length"])
    with torch.no_grad():
        return int(_OnPixels(model.encoder)(_pixels(1, int(source.config["tiles"]["size_px"]))).shape[1])


def _pixels(count: int, size: int) -> torch.Tensor:
    """Return random tiles, (count, 3, size, size) uint8; the same ones for the same ``count``."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


class _OnPixels(nn.Module):
    """The encoder, its normalisation included, on uint8 pixels."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        # Within the file: other programs give pixels as they are in a picture.
        vectors: torch.Tensor = self.encoder(pixels.to(torch.float32) / 255)
        return vectors


class _Outputs(nn.Module):
    """The aggregator without its attention."""

    def __init__(self, aggregator: nn.Module) -> None:
        super().__init__()
        self.aggregator = aggregator

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        returned: Any = self.aggregator(vectors)
        outputs: torch.Tensor = returned[0] if isinstance(returned, tuple) else returned
        return outputs.reshape(1, -1)
