"""Encoders of the library transformers, from a local folder."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data.loading.normalise import Normalisation
from hyfi_core.errors import RequestError

_BYTE = 1 / 255
"""The factor by which pixels are scaled before they are normalised."""


def transformers_module(
    name: str, options: Mapping[str, Any], with_weights: bool, allow_download: bool
) -> tuple[nn.Module, str, tuple[str, ...]]:
    """Return a module of transformers, the source of its weights, and the tensors that its files lack.

    The source is ``name``, or an empty text if no weights were loaded.

    Args:
        name: A folder with ``config.json`` and weights; or a name of the Hub, if downloads are allowed.
        options: Values that replace those of its ``config.json``.
        with_weights: Whether to load its weights.
        allow_download: Whether transformers may download.

    Raises:
        RequestError: There is no such folder, or transformers cannot read it.
    """
    try:
        transformers = import_module("transformers")
    except ImportError as error:
        raise RequestError(
            f"encoder transformers:{name}: transformers cannot be imported ({error}); install it with "
            f"`pip install 'hyfi[encoders]'`"
        ) from error
    if not Path(name).is_dir() and not allow_download:
        raise RequestError(
            f"encoder transformers:{name}: no such folder, and nothing is downloaded; use a folder with config.json "
            f"and model.safetensors"
        )
    transformers.utils.logging.set_verbosity_error()  # missing tensors are reported by `TileEncoder`
    transformers.utils.logging.disable_progress_bar()
    try:
        configuration = transformers.AutoConfig.from_pretrained(name, local_files_only=not allow_download, **options)
        if not with_weights or (Path(name).is_dir() and not _has_weights(Path(name))):
            return transformers.AutoModel.from_config(configuration), "", ()
        arguments = {"config": configuration, "local_files_only": not allow_download, "dtype": torch.float32}
        module, facts = transformers.AutoModel.from_pretrained(name, output_loading_info=True, **arguments)
        missing = _missing(facts)
        if missing and all(_is_pooler(key) for key in missing):  # leave out a random pooler; use the class token
            module, facts = transformers.AutoModel.from_pretrained(
                name, output_loading_info=True, add_pooling_layer=False, **arguments
            )
            missing = _missing(facts)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(f"encoder transformers:{name}: {reason}") from error
    return module, str(name), missing


def architecture_of(module: nn.Module) -> dict[str, Any]:
    """Return the JSON from which `module_of` builds a module of transformers again, without its folder."""
    configuration: Any = module.config
    # The configuration does not say whether the module has a pooler: it is an argument of the class.
    pools = any(name.startswith("pooler.") for name in module.state_dict())
    # use_diff=False: defaults may change with the version of transformers.
    return {"config": json.loads(configuration.to_json_string(use_diff=False)), "pools": pools}


def module_of(architecture: Mapping[str, Any]) -> nn.Module:
    """Build the module of transformers that `architecture_of` has described, with random weights.

    Args:
        architecture: ``config``, the module's configuration, and ``pools``, whether it has a pooler.

    Raises:
        RequestError: transformers is not installed, or does not know such a module.
    """
    stated = dict(architecture["config"])
    kind = str(stated.pop("model_type", ""))
    try:
        transformers = import_module("transformers")
        configuration = transformers.AutoConfig.for_model(kind, **stated)
        # Private: the class is needed, to see below whether it takes `add_pooling_layer`.
        factory = transformers.AutoModel._model_mapping[type(configuration)]
    except (ImportError, KeyError, ValueError) as error:
        raise RequestError(
            f"encoder of transformers, kind {kind!r}: it cannot be built ({error}); `pip install 'hyfi[encoders]'`"
        ) from error
    takes_pooling = "add_pooling_layer" in inspect.signature(factory.__init__).parameters
    options = {"add_pooling_layer": architecture["pools"]} if takes_pooling else {}
    module: nn.Module = factory(configuration, **options)
    return module


def pooled(returned: Any) -> Any:
    """Return the vectors ``(n, D)`` of what a vision model of transformers returns: pooled, or its class token."""
    vectors = getattr(returned, "pooler_output", None)
    if vectors is None and isinstance(getattr(returned, "last_hidden_state", None), torch.Tensor):
        hidden = returned.last_hidden_state
        # (n, tokens, D): the class token; (n, D, h, w), as of a ConvNeXt: the mean over positions.
        vectors = hidden[:, 0] if hidden.dim() == 3 else hidden.mean((-2, -1))
    return vectors.flatten(1) if isinstance(vectors, torch.Tensor) else returned


def normalisation_in(name: str) -> Normalisation | None:
    """Return the normalisation of a folder's ``preprocessor_config.json``; None without one.

    Raises:
        RequestError: The file is damaged.
    """
    path = Path(name) / "preprocessor_config.json"
    if not path.is_file():
        return None
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
        scale = float(stated.get("rescale_factor") or _BYTE) if stated.get("do_rescale", True) else 1.0
        normalises = stated.get("do_normalize", True) and "image_mean" in stated
        mean, std = (stated["image_mean"], stated["image_std"]) if normalises else ((0.0,) * 3, (1.0,) * 3)
        # (scale · pixel − mean) / std, as (pixel / 255 − mean′) / std′
        factor = _BYTE / scale
        return Normalisation.from_json({"mean": [m * factor for m in mean], "std": [s * factor for s in std]})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{path}: not a configuration of an image processor ({error!r})") from error


def _has_weights(folder: Path) -> bool:
    return any(True for pattern in ("*.safetensors", "*.bin") for _ in folder.glob(pattern))


def _missing(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of tensors that are random after loading: the file lacks them, or has another shape."""
    keys = list(facts.get("missing_keys") or ())
    # (name, shape in the file, shape in the model) in some versions.
    keys += [entry[0] if isinstance(entry, tuple) else entry for entry in facts.get("mismatched_keys") or ()]
    return tuple(sorted(map(str, keys)))


def _is_pooler(name: str) -> bool:
    return "pooler" in name.split(".")
