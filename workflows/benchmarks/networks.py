"""Networks of other packages, untouched: captured, and trained one step on 2 x 2 ranks against one process.

    python -m workflows.benchmarks.networks [--only PATTERN] [--seconds 3600]

Prints a line for each network: ``exact`` with the largest error of a gradient over its norm, ``refused`` with what
was refused, ``impossible`` where the network itself does not run on such a small image, or ``wrong``; and their numbers
in the end. Ranks are threads, images 2 x 3 x 96 x 96 in float64, weights random. Packages that are not installed are
left out: ``pip install timm torchvision pytorchcv`` brings them, of versions that go with the installed torch.
"""

from __future__ import annotations

import argparse
import collections
import copy
import fnmatch
import functools
import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import hyfi_core
from hyfi_core.capture.export import capture
from hyfi_core.comm.threads import run_ranks
from hyfi_core.errors import RequestError

SHAPE = (2, 3, 96, 96)
CLASSES = 3
TOLERANCE = 1e-8

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

Make = Callable[[], nn.Module]


def networks() -> Iterator[tuple[str, Make]]:
    """Yield (package/name, maker) of what is installed, by turns of the packages."""
    sources: list[list[tuple[str, Make]]] = []
    for package, names, make in (
        ("timm", TIMM, _timm),
        ("torchvision", TORCHVISION, _torchvision),
        ("pytorchcv", PYTORCHCV, _cv),
    ):
        try:
            module = importlib.import_module(
                {"torchvision": "torchvision.models", "pytorchcv": "pytorchcv.model_provider"}.get(package, package)
            )
        except ImportError:
            continue
        sources.append([(f"{package}/{name}", functools.partial(make, module, name)) for name in names.split()])
    while any(sources):
        for source in sources:
            if source:
                yield source.pop(0)


def _timm(module: Any, name: str) -> nn.Module:
    for options in ({"drop_rate": 0.0, "drop_path_rate": 0.0}, {"drop_rate": 0.0}, {}):
        try:
            model: nn.Module = module.create_model(name, pretrained=False, num_classes=CLASSES, **options)
            return model
        except TypeError:
            continue
    raise RuntimeError(f"timm has no {name}")


def _torchvision(module: Any, name: str) -> nn.Module:
    options = {"aux_logits": False, "init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model: nn.Module = getattr(module, name)(weights=None, num_classes=CLASSES, **options)
    return model


def _cv(module: Any, name: str) -> nn.Module:
    model: nn.Module = module.get_model(name, pretrained=False, num_classes=CLASSES)
    return model


def without_drops(model: nn.Module) -> nn.Module:
    """Return the model with nothing random in it: PyTorch's random numbers are others than ours."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name in ("drop_prob", "drop_path_rate"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
        if type(module).__name__ == "StochasticDepth":
            module.p = 0.0  # type: ignore[assignment]
    return model


def outcome(make: Make) -> str:
    """Return what became of one network, in a line."""
    torch.manual_seed(0)
    images, labels = torch.randn(SHAPE, dtype=torch.float64), torch.tensor([0, 1])
    try:
        model = without_drops(make()).double().train()
        reference = copy.deepcopy(model)
        F.cross_entropy(reference(images), labels).backward()
    except Exception as error:
        return f"impossible: {str(error).splitlines()[0][:120]}"
    try:
        found = trained(model, images, labels)
    except RequestError as error:
        return f"refused: {str(error)[:200]}"
    largest = worst(found, {name: p.grad for name, p in reference.named_parameters() if p.grad is not None})
    return f"{'exact' if largest <= TOLERANCE else 'wrong'} {largest:.1e}"


def trained(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of a step on 2 x 2 ranks, which share one capture."""
    copies = [copy.deepcopy(model) for _ in range(4)]
    plan = hyfi_core.ParallelPlan(grids=((2, 2),))
    program = capture(model, SHAPE, torch.float64)

    def body(comm: Any) -> Any:
        engine = hyfi_core.parallelize(copies[comm.rank], SHAPE, plan, comm, verify=False)
        engine.accumulate(images, labels)
        return engine.gather_gradients()

    with mock.patch("hyfi_core.runtime.compiled.capture", lambda *given: program):
        gradients: dict[str, torch.Tensor] = run_ranks(4, body)[0]
    return gradients


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Return the largest error of a gradient over its norm, or over a thousandth of all gradients' norm."""
    if set(found) != set(wanted):
        return float("inf")
    everything = torch.cat([g.flatten() for g in wanted.values()]).norm()
    return max(float((found[n] - g).norm() / max(g.norm(), 1e-3 * everything)) for n, g in wanted.items())


def main() -> None:
    """Print what became of each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="a pattern of package/name")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no network is begun after this long")
    given = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    began = time.monotonic()
    for name, make in networks():
        if not fnmatch.fnmatch(name, given.only) or time.monotonic() - began > given.seconds:
            continue
        told = outcome(make)
        counts[told.split()[0].rstrip(":")] += 1
        print(f"{name:40} {told}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())), flush=True)


if __name__ == "__main__":
    main()
