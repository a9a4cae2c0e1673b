"""Test of unmodified networks of other packages: capture at full size, and a step on 2 x 2 ranks against one process.

    python -m workflows.benchmarks.networks [--only PATTERN] [--seconds 3600] [--rows FILE] [--again refused]

Each network is captured for images of 2048 x 2048 px and lowered for 2 x 2 ranks. Then 2 x 2 ranks (threads) train one
step on small images in float64, with random weights. Prints a line for each network: ``exact`` with the largest error
of a gradient relative to its norm, ``refused`` with the reason, ``impossible`` if the network itself does not run on
such images, ``stopped`` if it takes too long, or ``wrong``; at the end, the number of networks with each outcome.

With ``--rows``, results are appended to a file of JSON lines, and networks in that file are not run again, unless their
outcome is given with ``--again``. Packages that are not installed are skipped; install them with
``pip install timm torchvision pytorchcv transformers monai``, in versions for the installed torch.
"""

from __future__ import annotations

import argparse
import collections
import copy
import fnmatch
import functools
import importlib
import json
import logging
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.capture.program import Program
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError
from hyfi_core.lowering.lower import Target, lower

FULL = (1, 3, 2048, 2048)
SMALL = [(2, 3, 96, 96), (2, 3, 224, 224), (2, 3, 256, 256)]
"""Image shapes to try; the first on which the network itself runs is used."""
CLASSES = 3
TOLERANCE = 1e-8
MAX_PARAMETERS = 60_000_000
"""Most parameters: in float64, with gradients, on every rank and in the reference these are 5 GB."""
GRID = (2, 2)

TIMM = """
resnet10t resnet14t resnet18 resnet18d resnet26 resnet26t legacy_seresnet18 skresnet18 eca_resnext26ts
seresnext26t_32x4d gcresnext26ts resnetv2_18 mobilenetv1_100 mobilenetv2_035 mobilenetv2_050
mobilenetv3_small_050 mobilenetv3_small_100 mobilenetv4_conv_small_050 lcnet_035 lcnet_050 tinynet_e tinynet_d
mnasnet_small semnasnet_075 spnasnet_100 fbnetc_100 fbnetv3_b hardcorenas_a efficientnet_lite0 efficientnet_b0
tf_efficientnet_b0 tf_efficientnetv2_b0 mixnet_s tf_mixnet_s ghostnet_050 ghostnetv2_100 rexnet_100
rexnetr_100 regnetx_002 regnety_002 regnetz_005 regnetv_040 dla34 dla46_c dla46x_c densenet121
densenetblur121d vgg11 vgg11_bn ese_vovnet19b_slim vovnet39a cs3darknet_s darknet17 darknet21 sedarknet21
cspresnet50 cspdarknet53 convnext_atto convnext_femto convnextv2_atto inception_next_atto mobileone_s0
repvgg_a0 repghostnet_050 repvit_m0_9 selecsls42 gernet_s edgenext_xx_small mobilevit_xxs mobilevitv2_050
poolformer_s12 poolformerv2_s12 efficientformer_l1 efficientvit_b0 efficientvit_m0 fastvit_t8 levit_128s
starnet_s1 hgnetv2_b0 hgnet_tiny xception41 inception_v3 res2net50_14w_8s resnest14d hrnet_w18_small dpn48b
nf_resnet26 eca_nfnet_l0 rdnet_tiny caformer_s18 convformer_s18 focalnet_tiny_srf vit_tiny_patch16_224
swin_tiny_patch4_window7_224 lambda_resnet26t halonet26t botnet26t_256 bat_resnext26ts coatnet_pico_rw_224
maxvit_pico_rw_256 pvt_v2_b0 xcit_nano_12_p16_224 visformer_tiny tiny_vit_5m_224 mixer_s16_224 gmixer_12_224
davit_tiny twins_svt_small nextvit_small
"""
TORCHVISION = """
resnet18 resnet34 resnext50_32x4d alexnet vgg11 vgg11_bn squeezenet1_0 squeezenet1_1 densenet121 googlenet
inception_v3 mobilenet_v2 mobilenet_v3_small mobilenet_v3_large shufflenet_v2_x0_5 shufflenet_v2_x1_0
mnasnet0_5 mnasnet1_0 regnet_x_400mf regnet_y_400mf efficientnet_b0 efficientnet_v2_s convnext_tiny swin_t
vit_b_16 maxvit_t
"""
PYTORCHCV = """
resnet10 resnet12 resnet14 preresnet10 seresnet10 sepreresnet10 resnext14_16x4d seresnext50_32x4d bagnet9
vgg11 bn_vgg11 airnet50_1x64d_r2 bam_resnet18 cbam_resnet18 scnet50 regnetx002 regnety002 diracnet18v2
densenet121 peleenet wrn50_2 drnc26 dla34 dla46c hardnet39ds hrnet_w18_small_v1 vovnet27s selecsls42
squeezenet_v1_1 squeezeresnet_v1_1 sqnxt23_w1 shufflenet_g1_wd4 shufflenet_g3_wd4 shufflenetv2_wd2
shufflenetv2b_wd2 menet108_8x1_g3 mobilenet_wd4 fdmobilenet_wd4 mobilenetv2_wd4 mobilenetv3_large_w1 igcv3_wd4
mnasnet_b1 darknet_tiny darknet_ref darknet19 ghostnet proxylessnas_mobile fbnet_cb spnasnet efficientnet_b0
mixnet_s isqrtcovresnet18 xception channelnet ibn_resnet50 octresnet10_ad2 resneta10 resnestabc14 sknet50
espnetv2_wd2 dicenet_wd5 zfnet alexnet nin_cifar10
"""

TRANSFORMERS = """
ResNet RegNet MobileNetV1 MobileNetV2 ConvNext ConvNextV2 EfficientNet Bit PoolFormer Cvt SwiftFormer Levit MobileViT
MobileViTV2 FocalNet HGNetV2 PvtV2 Segformer TextNet PPLCNet ViT Swin Swinv2 Dinov2 Beit
"""
MONAI = """
DenseNet121 SEResNet50 SEResNext50 SENet154 resnet10 resnet18 resnet34 resnet50 efficientnet-b0 efficientnet-b1
"""

Make = Callable[[int], nn.Module]
"""Returns the network for images of a given height and width in pixels."""
Outcomes = dict[str, str]


def networks() -> Iterator[tuple[str, Make]]:
    """Yield (package/name, maker) of the networks of installed packages, alternating between packages."""
    sources: list[list[tuple[str, Make]]] = []
    for package, module_name, names, make in (
        ("timm", "timm", TIMM, _timm),
        ("torchvision", "torchvision.models", TORCHVISION, _torchvision),
        ("pytorchcv", "pytorchcv.model_provider", PYTORCHCV, _cv),
        ("transformers", "transformers", TRANSFORMERS, _transformers),
        ("monai", "monai.networks.nets", MONAI, _monai),
    ):
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        sources.append([(f"{package}/{name}", functools.partial(make, module, name)) for name in names.split()])
    # Alternating, so that a run that is stopped has seen all packages.
    while any(sources):
        for source in sources:
            if source:
                yield source.pop(0)


def _timm(module: Any, name: str, side_px: int) -> nn.Module:
    """Return a timm network without dropout, built for images of ``side_px`` if it takes an image size."""
    drops = {"drop_rate": 0.0, "drop_path_rate": 0.0}
    # Not every timm model takes all of these arguments: after each TypeError, fewer are tried.
    for options in ({**drops, "img_size": side_px}, drops, {"drop_rate": 0.0}, {}):
        try:
            model: nn.Module = module.create_model(name, pretrained=False, num_classes=CLASSES, **options)
            return model
        except TypeError:
            continue
    raise RuntimeError(f"timm has no {name}")


def _torchvision(module: Any, name: str, side_px: int) -> nn.Module:
    """Return a torchvision network without auxiliary classifiers: its only output is the logits."""
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": False}
    elif name.startswith("vit"):
        options = {"image_size": side_px}
    model: nn.Module = getattr(module, name)(weights=None, num_classes=CLASSES, **options)
    return model


def _cv(module: Any, name: str, side_px: int) -> nn.Module:
    """Return a pytorchcv network; global pooling replaces its last pooling, whose 7 x 7 pixels fit 224 px only."""
    model: nn.Module = module.get_model(name, pretrained=False, num_classes=CLASSES)
    last = getattr(getattr(model, "features", None), "final_pool", None)
    if isinstance(last, nn.AvgPool2d):
        model.features.final_pool = nn.AdaptiveAvgPool2d(1)  # type: ignore[union-attr]
    return model


class Logits(nn.Module):
    """A classifier of transformers that returns its logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: torch.Tensor) -> Any:
        """Return logits ``(B, K)``."""
        return self.network(images).logits


def _transformers(module: Any, name: str, side_px: int) -> nn.Module:
    config = getattr(module, f"{name}Config")(num_labels=CLASSES, image_size=side_px)
    return Logits(getattr(module, f"{name}ForImageClassification")(config))


def _monai(module: Any, name: str, side_px: int) -> nn.Module:
    """Return a MONAI network; each family has names of its own for the same arguments."""
    shape = {"spatial_dims": 2, "in_channels": 3}
    model: nn.Module
    if name.startswith("efficientnet"):
        model = module.EfficientNetBN(name, pretrained=False, num_classes=CLASSES, **shape)
    elif name.startswith("resnet"):
        model = getattr(module, name)(spatial_dims=2, n_input_channels=3, num_classes=CLASSES)
    elif name.startswith("DenseNet"):
        model = getattr(module, name)(out_channels=CLASSES, **shape)
    else:
        model = getattr(module, name)(num_classes=CLASSES, **shape)
    return model


def without_drops(model: nn.Module) -> nn.Module:
    """Return the model without random operators, whose random numbers would differ from plain PyTorch's."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        # Drop-path has no common class: each package has its own module or attribute for the probability.
        for name in ("drop_prob", "drop_path_rate", "drop_connect_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
        if type(module).__name__ == "StochasticDepth":
            module.p = 0.0  # type: ignore[assignment]
    return model


def full_size(make: Make) -> str:
    """Return the outcome of capturing and lowering one network at full size."""
    try:
        model = without_drops(make(FULL[-1])).train()
        # Fake tensors need no memory. A network that fails here fails at this size by itself: nothing refuses it.
        with FakeTensorMode(allow_non_fake_inputs=True):
            model(torch.empty(FULL))
    except Exception as error:
        return f"impossible: {_first_line(error)}"
    try:
        program = capture(model, FULL, torch.float32)
    except RequestError as error:
        return f"refused at capture: {str(error)[:300]}"
    try:
        lower(program, Target(GRID, 0))
    except RequestError as error:
        return f"refused on 2 x 2: {str(error)[:300]}"
    return "captured"


def small_size(make: Make) -> str:
    """Return the outcome of one training step of one network on small images."""
    labels, reason = torch.tensor([0, 1]), ""
    # The first of these sizes that the network takes: some networks need larger images.
    for shape in SMALL:
        torch.manual_seed(0)
        try:
            model = without_drops(make(shape[-1])).double().train()
            if sum(p.numel() for p in model.parameters()) > MAX_PARAMETERS:
                return f"impossible: more than {MAX_PARAMETERS} parameters, on each of {GRID[0] * GRID[1]} ranks"
            images, reference = torch.randn(shape, dtype=torch.float64), copy.deepcopy(model)
            F.cross_entropy(reference(images), labels).backward()
            break
        except Exception as error:
            reason = _first_line(error)
    else:
        return f"impossible: {reason}"
    try:
        program = capture(model, shape, torch.float64)
        gradients = gradients_on_ranks(model, program, images, labels)
    except RequestError as error:
        return f"refused: {str(error)[:300]}"
    error_of_gradients = worst(
        gradients, {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    )
    outcome = "exact" if error_of_gradients <= TOLERANCE else "wrong"
    return f"{outcome} {error_of_gradients:.1e} at {shape[2]} px"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:150]}"


def gradients_on_ranks(
    model: nn.Module, program: Program, images: torch.Tensor, labels: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the gradients of a step on 2 x 2 ranks, which share one captured program."""
    copies = [copy.deepcopy(model) for _ in range(GRID[0] * GRID[1])]
    plan, (batch, channels, height, width) = hyfi_core.ParallelPlan(grids=(GRID,)), images.shape
    shape = batch, channels, height, width

    def body(comm: Any) -> Any:
        engine = hyfi_core.parallelize(copies[comm.rank], shape, plan, comm, verify=False)
        engine.accumulate(images, labels)
        return engine.gather_gradients()

    # Ranks are threads here. Without the patch, each would capture the same model again.
    with mock.patch("hyfi_core.runtime.subject.capture", lambda *args: program):
        gradients: dict[str, torch.Tensor] = run_ranks(len(copies), body)[0]
    return gradients


def worst(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the largest relative error of a gradient; infinite if names differ, NaN if a gradient has NaN.

    An error is relative to the norm of its gradient, or to 1/1000 of the norm of all gradients if that is larger.
    """
    if set(gradients) != set(expected):
        return float("inf")
    everything = torch.cat([g.flatten() for g in expected.values()]).norm()
    # Batch norm makes the gradient of a bias before it 0 but for rounding, whose error relative to itself is large.
    return largest(float((gradients[n] - g).norm() / max(g.norm(), 1e-3 * everything)) for n, g in expected.items())


def largest(errors: Iterable[float]) -> float:
    """Return the largest error; NaN if one is NaN, which `max` may pass over; 0 without errors."""
    return max(errors, key=lambda error: (math.isnan(error), error), default=0.0)


def in_child(check: Callable[[Make], str], make: Make, limit_s: float) -> str:
    """Return the outcome of ``check(make)`` in a child process; hanging or crashing is an outcome, too."""
    # fork: the child has the makers without pickling, and the packages without importing them again.
    receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)

    def run() -> None:
        try:
            sender.send(check(make))
        except Exception as error:
            sender.send(f"failed: {_first_line(error)}")

    child = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    child.start()
    # While this process has the sending end open, too, `poll` would not see a crash before the time limit.
    sender.close()
    try:
        return str(receiver.recv()) if receiver.poll(limit_s) else f"stopped after {limit_s:.0f} s"
    except EOFError:
        return "stopped: its process ended"
    finally:
        child.kill()
        child.join()


def main() -> None:
    """Run each network at full size and small; print the outcomes, and how often each occurred."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="a pattern of package/name")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no network after this many seconds")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="time limit for each half of one network, in seconds"
    )
    parser.add_argument("--rows", type=Path, help="JSON lines: results, read and appended")
    parser.add_argument("--again", default="", help="run networks with this outcome again, such as refused")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # failures are reported as outcomes
    rows = _read(args.rows)
    began = time.monotonic()
    for name, make in networks():
        if not fnmatch.fnmatch(name, args.only) or time.monotonic() - began > args.seconds:
            continue
        former = rows.get(name)
        if former is None or (args.again and args.again in (_outcome(former["full"]), _outcome(former["small"]))):
            outcomes = {
                mode: in_child(run, make, args.limit) for mode, run in (("full", full_size), ("small", small_size))
            }
            rows[name] = {"name": name, **outcomes}
            if args.rows is not None:
                with args.rows.open("a") as file:
                    file.write(json.dumps(rows[name]) + "\n")
        print(f"{name:40} {rows[name]['full'][:160]:12} {rows[name]['small']}", flush=True)
    for mode in ("full", "small"):
        counts = collections.Counter(_outcome(row[mode]) for row in rows.values())
        print(f"{mode}: " + ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())), flush=True)


def _outcome(result: str) -> str:
    return result.split()[0].rstrip(":")


def _read(path: Path | None) -> dict[str, Outcomes]:
    """Return the rows of a file by name; if a network has several, the last."""
    if path is None or not path.exists():
        return {}
    return {row["name"]: row for row in map(json.loads, path.read_text().splitlines())}


if __name__ == "__main__":
    main()
