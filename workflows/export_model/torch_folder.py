"""A folder with weights and a short script that runs the user's own module without this package's commands."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save

from data.samples.colours.stain_normalisation import StainNormalisation
from hyfi_core.models.by_name import call_of_model
from workflows.export_model.exported import ExportSource

WEIGHTS, MODEL_JSON, SCRIPT = "model.safetensors", "model.json", "predict.py"

_HEAD = '''"""Predict one image: python {script} IMAGE (RGB at {mpp:g} micrometres per pixel)."""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
{imports}
HERE = Path(__file__).parent
{stain}model = {call}
model.load_state_dict(load_file(HERE / "{weights}"))
model.eval()

pixels = np.array(Image.open(sys.argv[1]).convert("RGB"))
mean, std = torch.tensor({mean}), torch.tensor({std})
image = ((torch.from_numpy(pixels) / 255 - mean) / std).permute(2, 0, 1)[None]
with torch.no_grad():
    outputs = model(image)
'''
_STAIN = """print("the image must be stain-normalised ({method}), as by hyfi predict", file=sys.stderr)
"""
_CLASSES = """for name, probability in zip({names}, torch.softmax(outputs / {temperature!r}, 1)[0].tolist()):
    print(f"{{name}}: {{probability:.4f}}")
"""
_OTHERS = """readout = readout_of(json.loads((HERE / "{model_json}").read_text(encoding="utf-8")))
for name, value in zip(readout.columns, readout.values(outputs[0].double().numpy()).tolist()):
    print(f"{{name}}: {{value:.6g}}")
"""


def write_torch(source: ExportSource, folder: Path) -> None:
    """Write weights under the names of the user's module, ``model.json`` and a script that predicts an image.

    Args:
        source: The checkpoint.
        folder: An existing, empty folder.
    """
    # safetensors refuses other strides, such as channels_last.
    weights = {name: tensor.contiguous() for name, tensor in source.member.model.state_dict().items()}
    (folder / WEIGHTS).write_bytes(save(weights))
    # Names of slides are not for others; `files` has digests of files that are not exported.
    config = {name: value for name, value in source.config.items() if name not in ("files", "trained_on")}
    text = json.dumps(config, ensure_ascii=False, indent=1)
    (folder / MODEL_JSON).write_text(text + "\n", encoding="utf-8")
    (folder / SCRIPT).write_text(_script(source), encoding="utf-8")


def _script(source: ExportSource) -> str:
    """Return the script; it imports the user's factory, or this package's for a built-in network.

    A model of classes (``temperature`` is not None) needs nothing else of this package; outputs of other tasks are read
    by the task's readout.
    """
    config = source.config
    path, arguments = call_of_model(config["model"])
    module, function = path.split(":")
    imports = [f"from {module} import {function}"]
    if source.temperature is None:
        imports = ["from workflows.tasks.by_name import readout_of", *imports]
    stain = StainNormalisation.from_json(config.get("stain_normalisation"))
    text = _HEAD.format(
        script=SCRIPT,
        mpp=float(config["mpp"]),
        imports="\n".join(["", *imports, ""]),
        call=f"{function}({', '.join(f'{name}={value!r}' for name, value in arguments.items())})",
        stain="" if stain is None else _STAIN.format(method=stain.method),
        weights=WEIGHTS,
        mean=list(source.normalisation.mean),
        std=list(source.normalisation.std),
    )
    if source.temperature is None:
        return text.replace("import sys\n", "import json\nimport sys\n", 1) + _OTHERS.format(model_json=MODEL_JSON)
    names = [str(name) for name in config["class_names"]]
    return text + _CLASSES.format(names=names, temperature=source.temperature)
