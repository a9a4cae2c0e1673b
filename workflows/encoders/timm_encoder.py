"""Encoders of timm, by name or from a folder as Hugging Face has them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from data.loading.normalise import Normalisation
from hyfi_core.errors import RequestError
from workflows.console import listed

_INSTALL = "install it with `pip install 'hyfi[encoders]'`"
_WEIGHTS = ("*.safetensors", "*.bin", "*.pth")


def import_timm() -> ModuleType:
    """Return the module ``timm``.

    Raises:
        RequestError: timm, or torchvision, which timm needs, is not installed or does not fit PyTorch.
    """
    try:
        return import_module("timm")
    except ModuleNotFoundError as error:
        name = error.name or "timm"
        raise RequestError(f"timm: {name.partition('.')[0]} is not installed; {_INSTALL}") from error
    except (ImportError, RuntimeError) as error:
        # torchvision of another build of PyTorch: "operator torchvision::nms does not exist"
        raise RequestError(
            f"timm cannot be imported ({error}): torchvision does not fit PyTorch {torch.__version__}; install both "
            f"from one index: `pip install torch torchvision --index-url https://download.pytorch.org/whl/cpu`"
        ) from error


def timm_module(
    name: str, options: Mapping[str, Any], with_weights: bool, allow_download: bool
) -> tuple[nn.Module, str]:
    """Return (a module of timm without its head, the source of its weights as text; empty if they are random).

    Args:
        name: A name of timm's, or a folder with ``config.json`` and weights.
        options: Further arguments of ``timm.create_model``.
        with_weights: Whether to load the weights of the folder or, if allowed, of the Hub.
        allow_download: Whether timm may download.

    Raises:
        RequestError: timm has no such model, or does not take the options.
    """
    timm = import_timm()
    folder = Path(name)
    # In each branch: the argument of `create_model`, whether it loads weights, and their source as text.
    if folder.is_dir():
        stored = sorted(path for pattern in _WEIGHTS for path in folder.glob(pattern))
        timm_name, pretrained = f"local-dir:{folder}", bool(stored) and with_weights
        source = str(folder) if pretrained else ""
    elif ":" not in name and ("/" in name or "\\" in name):  # names of timm's have none
        raise RequestError(
            f"encoder timm:{name}: there is no such folder; timm builds the network from its config.json, also for a "
            f"checkpoint that was trained with it: put the folder there again, or use timm's name of the network"
        )
    elif ":" in name and not allow_download:
        raise RequestError(
            f"encoder timm:{name}: nothing is downloaded; use the folder that you downloaded, timm:FOLDER, or a name "
            f"of timm's and a file of weights"
        )
    else:
        timm_name, pretrained = name, with_weights and allow_download
        source = f"downloaded by timm as {name}" if pretrained else ""
        if ":" not in name and not timm.is_model(name):
            alike = timm.list_models(f"*{name.split('.')[0]}*")[:5] or timm.list_models("vit_*")[:5]
            raise RequestError(
                f"encoder timm:{name}: timm {timm.__version__} has no such model; it has {listed(alike)}"
            )
    try:
        module = timm.create_model(timm_name, pretrained=pretrained, **({"num_classes": 0} | dict(options)))
    except (TypeError, ValueError, RuntimeError, KeyError, AssertionError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RequestError(f"encoder timm:{name} cannot be built with {dict(options)}: {reason}") from error
    return module, source


def normalisation_of(module: nn.Module) -> Normalisation | None:
    """Return the normalisation that timm's configuration of a module states; None without one."""
    configuration = getattr(module, "pretrained_cfg", None) or getattr(module, "default_cfg", None)
    # Networks for other images than RGB have other numbers of means, or none.
    if not isinstance(configuration, Mapping) or any(len(configuration.get(k) or ()) != 3 for k in ("mean", "std")):
        return None
    return Normalisation.from_json(configuration)
