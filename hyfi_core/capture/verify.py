"""Comparison of a module with its capture, on small images in one process: finds differences that guards miss.

```
module   ── image 1 ── output, gradients ── image 2 ── output, gradients, buffers
program  ── image 1 ── output, gradients ── image 2 ── output, gradients, buffers      equal to rounding?
```

There are two steps, because a forward may keep state between them. Random operators draw the same numbers on both
sides. The module and all random number generators are restored afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree

from hyfi_core.capture.checkpoints import plain_checkpoints
from hyfi_core.capture.export import capture
from hyfi_core.capture.first_difference import equal, first_module
from hyfi_core.capture.guards import restored
from hyfi_core.capture.interpret import RepeatableDraws, interpret
from hyfi_core.capture.patching import PATCHING
from hyfi_core.capture.program import Program
from hyfi_core.capture.released import device_of
from hyfi_core.capture.storing.stored_tensors import Caches, OfImage, StoredTensors, StoringRun
from hyfi_core.errors import RequestError
from hyfi_core.plan.batch_shapes import Shape

_SIDES_PX = (64, 128, 224, 256, 384, 448, 512)  # with the usual sides of tiles
_MOST_IMAGES = 2
_STEPS = 2
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-4}
"""Largest relative difference; both sides run the same kernels in the same order."""
_COARSE = 3e-2
"""Largest relative difference for other dtypes, and for models that cannot run in float64."""
_MIXED = 1e-3
"""Relative change of an image's outputs above which they depend on the other image; the same kernels run."""

Output = Callable[[Any], Any]
Observed = dict[str, torch.Tensor | None]
"""Results of two steps: description -> value, None for a missing gradient."""


def verify_capture(model: nn.Module, shape: Shape, dtype: torch.dtype, output: Output | None = None) -> str | None:
    """Compare a model with its capture on small images, in its current mode and in evaluation mode.

    Args:
        model: any, in the mode in which it will be trained; restored afterwards.
        shape: shape of a micro-batch; smaller images are used if the model accepts them.
        dtype: dtype of the images.
        output: selects the logits from the output.

    Returns:
        None if they are equal, else the reason why they could not be compared.

    Raises:
        RequestError: they differ; the message says where, and names the first module that differs.
    """
    stored = StoredTensors()
    try:
        reason = _compare(model, shape, dtype, output or (lambda value: value), "", stored)
        if reason is None and any(module.training for module in model.modules()):
            with _evaluating(model):  # a capture that fails here is reported when this mode is used
                _compare(model, shape, dtype, output or (lambda value: value), ", in evaluation mode", stored)
    finally:
        # Tensors that the model stored in these runs are no longer true: reading one raises an error from now on.
        stored.void()
    return reason


def mixes_images(model: nn.Module, shape: Shape, dtype: torch.dtype, output: Output | None = None) -> bool:
    """Whether outputs for an image depend on the other images of its batch in evaluation mode, as small images show.

    Args:
        model: any; restored afterwards.
        shape: shape of a micro-batch.
        dtype: dtype of the images.
        output: selects the logits from the output.
    """
    pick, stored = output or (lambda value: value), StoredTensors()
    try:
        with _evaluating(model):
            # Two of each shape: for one image alone, other kernels round otherwise, and random numbers may differ.
            for small in _small_shapes((2, *shape[1:])):
                images = _image(small, dtype, model, 0)
                others = images.clone()
                others[1] = images[1] / 4 + 1  # other statistics
                # The first shape that works decides: a model may refuse small images.
                with contextlib.suppress(Exception):
                    first, second = (_evaluated(model, pick, stored, batch) for batch in (images, others))
                    return any(_first_differs(*pair) for pair in zip(first, second, strict=True))
    finally:
        stored.void()
    return False


def _evaluated(model: nn.Module, pick: Output, stored: StoredTensors, images: torch.Tensor) -> list[Any]:
    """Return the outputs of a forward without gradients, which leaves the model as it was."""
    of_image = OfImage()
    with undisturbed(model), _without_caches(model, of_image), torch.no_grad():
        leaves = _pytree.tree_leaves(_storing_run(model, pick, stored, of_image)(images))
        # Copies: an output may be a buffer, which is restored.
        return [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _first_differs(first: Any, second: Any) -> bool:
    """Whether the outputs of the first of two images differ between two batches by more than rounding."""
    if not isinstance(first, torch.Tensor) or first.shape[:1] != (2,) or second.shape != first.shape:
        return False
    difference, size = (first[:1] - second[:1]).double().norm(), first[:1].double().norm()
    return bool(difference > _MIXED * size)


def _storing_run(
    model: nn.Module, pick: Output, stored: StoredTensors, of_image: OfImage
) -> Callable[[torch.Tensor], Any]:
    """Return the model's forward, which notes the tensors that the model stores."""

    def run(image: torch.Tensor) -> Any:
        stored.note([image])
        of_image.add([image])
        with StoringRun(stored, of_image):
            return pick(model(image))

    return run


def _compare(
    model: nn.Module, shape: Shape, dtype: torch.dtype, pick: Output, mode: str, stored: StoredTensors
) -> str | None:
    """Compare a model with its capture in the current mode; return None if equal, else why they were not compared.

    Args:
        model: the model, in the mode to compare.
        shape: shape of a micro-batch.
        dtype: dtype of the images.
        pick: selects the logits from the output.
        mode: text for the message, such as ", in evaluation mode".
        stored: gets the tensors that the model may have stored.

    Raises:
        RequestError: they differ.
    """
    of_image = OfImage()
    run = _storing_run(model, pick, stored, of_image)
    # The first shape that works: a model may need a smallest size, such as a whole window of its last pool.
    for small in _small_shapes(shape):
        with contextlib.suppress(Exception), undisturbed(model), _without_caches(model, of_image):
            expected = _steps(model, small, dtype, run, lambda: dict(model.named_buffers()))
            break
    else:
        return f"it fails on every image size tried, up to {_SIDES_PX[-1]} px, in one process"
    try:
        program = capture(model, small, dtype)
    except RequestError as error:
        return f"it cannot be captured for images of {small[2]} x {small[3]} px ({error})"
    # The tolerance is that of the weights' dtype: images of bytes are converted by the model.
    computed = next((p.dtype for p in model.parameters() if p.is_floating_point()), dtype)
    difference = equal(expected, _of_program(model, program, small, dtype, pick), _TOLERANCE.get(computed, _COARSE))
    # A difference alone is no reason to refuse: in float32, a norm over few values can amplify rounding beyond the
    # tolerance.
    if difference is None or not _exceeds_rounding(model, small, dtype, pick, expected, program):
        return None
    with undisturbed(model):
        first = first_module(model, program, _image(small, dtype, model, 0))
    raise RequestError(
        f"the captured program does not compute what {type(model).__name__} computes: {difference}, in two steps on "
        f"images of shape {small}{mode}{first}. Its forward does something that capture does not record, such as an "
        f"autograd hook or state outside of its buffers. verify=False turns this check off"
    )


@contextlib.contextmanager
def _without_caches(model: nn.Module, of_image: OfImage) -> Iterator[None]:
    """Context that, on exit, removes values that the model has stored and that do not depend on an image."""
    caches = Caches(model)
    try:
        yield
    finally:
        caches.undo(of_image)


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Context with all modules in evaluation mode."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Context that restores a module's values and attributes, and all random number generators, on exit."""
    device = device_of(model)
    # Clones, although most models change no weight: changes in place are noticed only by comparing values.
    tensors = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in tensors]
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    host, thread = (random.getstate(), np.random.get_state()), threading.get_ident()
    try:
        with (
            PATCHING,
            # A checkpoint would compute its part again in backward, and update running statistics twice.
            plain_checkpoints(lambda: contextlib.nullcontext() if threading.get_ident() == thread else None),
            restored(model),
            # Without a list, fork_rng saves and restores the generators of all GPUs.
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            RepeatableDraws(),
        ):
            yield
    finally:
        random.setstate(host[0])
        np.random.set_state(host[1])
        for module, contents in buffers:
            module._buffers.update(contents)  # a forward may have replaced them
        for tensor, value in zip(tensors, before, strict=True):
            # Only what differs is written: a copy of every weight would take as long as the forward.
            if not torch.equal(tensor, value):
                # By ``.data``: autograd refuses to change a leaf in place, and the version is not counted up.
                tensor.data.copy_(value)


def _small_shapes(shape: Shape) -> Iterator[Shape]:
    """Yield the shapes to try, smallest first."""
    sides = dict.fromkeys((min(shape[2], side), min(shape[3], side)) for side in _SIDES_PX)
    yield from ((min(shape[0], _MOST_IMAGES), shape[1], *side) for side in sides)


def _of_program(model: nn.Module, program: Program, shape: Shape, dtype: torch.dtype, pick: Output) -> Observed:
    """Return the results of two steps of a program, from the model's present weights and buffers."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers(remove_duplicate=False)}

    def run(image: torch.Tensor) -> Any:
        leaves, changed = interpret(program, parameters, buffers, image)
        buffers.update(changed)
        return pick(program.unflatten(leaves))

    with undisturbed(model):
        return _steps(model, shape, dtype, run, lambda: buffers)


def _exceeds_rounding(
    model: nn.Module, shape: Shape, dtype: torch.dtype, pick: Output, expected: Observed, program: Program
) -> bool:
    """Whether a difference is more than rounding: it occurs in float64, too, or is large if float64 is not possible."""
    exact_dtype = torch.float64 if dtype.is_floating_point else dtype  # of images
    if all(p.dtype == torch.float64 for p in model.parameters()):
        return True  # the difference was measured in float64 already
    try:
        exact = copy.deepcopy(model).double()
        with undisturbed(exact):
            exact_expected = _steps(
                exact, shape, exact_dtype, lambda image: pick(exact(image)), lambda: dict(exact.named_buffers())
            )
        actual = _of_program(exact, capture(exact, shape, exact_dtype), shape, exact_dtype, pick)
    except Exception:  # the model requires its own dtype
        return equal(expected, _of_program(model, program, shape, dtype, pick), _COARSE) is not None
    return equal(exact_expected, actual, _TOLERANCE[torch.float64]) is not None


def _steps(
    model: nn.Module,
    shape: Shape,
    dtype: torch.dtype,
    run: Callable[[torch.Tensor], Any],
    buffers: Callable[[], Mapping[str, torch.Tensor]],
) -> Observed:
    """Run two steps; return their outputs and gradients, and the buffers afterwards.

    The loss is a randomly weighted sum of all outputs.

    Args:
        model: has the parameters; its training mode counts.
        shape: shape of the images.
        dtype: dtype of the images.
        run: the forward.
        buffers: returns the present buffers by name.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    values: Observed = {}
    for step in range(1, _STEPS + 1):
        with torch.enable_grad():
            leaves = [leaf for leaf in _pytree.tree_leaves(run(_image(shape, dtype, model, step)))]
        outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        values.update({f"output {n} of step {step}": leaf.detach().clone() for n, leaf in enumerate(outputs)})
        differentiable = [leaf for leaf in outputs if leaf.requires_grad]
        if differentiable and trained:
            # A plain sum would hide errors: that of a softmax is constant, and that of normalised values is zero.
            weights = [_noise(leaf.shape, leaf.dtype, leaf.device, step) for leaf in differentiable]
            # Not backward(): the user's ``.grad`` and hooks of parameters stay as they are.
            gradients = torch.autograd.grad(differentiable, list(trained.values()), weights, allow_unused=True)
            named = reversed([*zip(trained, gradients, strict=True)])  # in the order of backward
            values.update({f"gradient of {name} in step {step}": gradient for name, gradient in named})
    values.update({f"buffer {name}": buffer.detach().clone() for name, buffer in buffers().items()})
    return values


def _image(shape: Shape, dtype: torch.dtype, model: nn.Module, step: int) -> torch.Tensor:
    device = device_of(model)
    noise = _noise(shape, torch.float64, device, step)
    return noise.to(dtype) if dtype.is_floating_point else noise.abs().mul(60).clamp(max=255).to(dtype)


def _noise(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    # On the CPU, so that the numbers are the same for every device.
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(device, dtype)
