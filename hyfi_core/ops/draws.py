"""Stateless random numbers: each is a hash of (key, position in the whole value).

    position   0 1 2 3 │ 4 5 6 7        a rank that owns the right half hashes the positions 4 … 7 and gets
    number     a b c d │ e f g h        the numbers of one process

The hash is splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014): the
position is multiplied by the golden ratio and mixed in two rounds of shift and multiply.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# The constants of splitmix64; the first is 2 ** 64 divided by the golden ratio.
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_BISECTIONS = 40
"""Steps that find a Poisson number of a rate up to about 10 ** 20; other numbers are too large to have all digits."""


def mixed(*words: int) -> int:
    """Return one 64-bit word that depends on every bit of all ``words``."""
    state = 0
    for word in words:
        state = (state + word * _GOLDEN + _GOLDEN) & _MASK
        state = ((state ^ (state >> 30)) * _FIRST) & _MASK
        state = ((state ^ (state >> 27)) * _SECOND) & _MASK
        state ^= state >> 31
    return state


def positions(
    shape: Sequence[int],
    dims: tuple[int, int] | None,
    box: tuple[int, int, int, int],
    device: torch.device,
    first: int,
) -> torch.Tensor:
    """Return the position of every element of a part in the whole value, int64.

    Args:
        shape: shape of the whole value.
        dims: indices of height and width, (y, x); None for a replicated value.
        box: (y0, y1, x0, x1) of the part.
        device: device of the result.
        first: position of the whole value's first element.
    """
    result = torch.full((), first, dtype=torch.int64, device=device)
    stride = 1
    # Row-major positions of the whole value: a part's stride is that of the whole, not its own.
    for dim in reversed(range(len(shape))):
        start, stop = 0, shape[dim]
        if dims is not None and dim in dims:
            start, stop = box[:2] if dim == dims[0] else box[2:]
        along = torch.arange(start, stop, dtype=torch.int64, device=device)
        along = along * stride
        result = result + along.view(-1, *[1] * (len(shape) - 1 - dim))
        stride *= shape[dim]
    return result


def uniform(key: int, where: torch.Tensor, dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
    """Return numbers in [low, high) of a floating type, one for each position.

    Args:
        key: 64 bits.
        where: int64 positions.
        dtype: dtype of the result; float64 has 53 random bits, others 24.
        low: smallest number.
        high: upper limit, which is never reached.
    """
    numbers = _uniform(key, where, dtype)
    if (low, high) == (0.0, 1.0):
        return numbers
    numbers = numbers.mul_(high - low).add_(low)
    return numbers.masked_fill_(numbers >= high, low)  # rounding may reach the limit


def _uniform(key: int, where: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers in [0, 1)."""
    bits = _hashed(key, where)
    if dtype == torch.float64:
        return _shifted(bits, 11).to(dtype).mul_(2.0**-53)
    # 24 bits: float32 has all multiples of 2 ** -24 below 1, so that nothing is rounded up to 1.
    number = _shifted(bits, 40).to(torch.float32).mul_(2.0**-24)
    if dtype == torch.float32:
        return number
    return number.to(dtype).clamp_(max=1.0 - torch.finfo(dtype).eps)  # 16 bits would round some numbers up to 1


def normal(key: int, where: torch.Tensor, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    """Return normal numbers, one for each position (Box and Muller, 1958)."""
    return (_normal(key, where) * std + mean).to(dtype)


def log_normal(key: int, where: torch.Tensor, dtype: torch.dtype, mean: float = 1.0, std: float = 2.0) -> torch.Tensor:
    """Return numbers whose logarithm is normal, one for each position."""
    return (_normal(key, where) * std + mean).exp().to(dtype)


def exponential(key: int, where: torch.Tensor, dtype: torch.dtype, rate: float = 1.0) -> torch.Tensor:
    """Return exponential numbers, one for each position; never 0, so that they have a logarithm."""
    # 1 - u is in (0, 1], so that its logarithm is finite.
    numbers = torch.log1p(-_uniform(key, where, torch.float64)) / -rate
    return numbers.to(dtype).clamp_(min=torch.finfo(dtype).tiny)


def cauchy(key: int, where: torch.Tensor, dtype: torch.dtype, median: float = 0.0, scale: float = 1.0) -> torch.Tensor:
    """Return Cauchy numbers, one for each position."""
    angle = (_uniform(key, where, torch.float64) - 0.5) * math.pi
    return (angle.tan() * scale + median).to(dtype)


def geometric(key: int, where: torch.Tensor, dtype: torch.dtype, probability: float) -> torch.Tensor:
    """Return geometric numbers, one for each position: how many trials the first success takes."""
    # log1p(-1) raises; with -inf, its limit, all numbers are 1.
    log_failure = math.log1p(-probability) if probability < 1.0 else -math.inf
    trials = torch.log1p(-_uniform(key, where, torch.float64)) / log_failure
    return trials.ceil().clamp_(min=1.0).to(dtype)


def integers(key: int, where: torch.Tensor, dtype: torch.dtype, *limits: int) -> torch.Tensor:
    """Return integers of a range, one for each position.

    Args:
        key: 64 bits.
        where: int64 positions.
        dtype: dtype of the result.
        limits: (high,) or (low, high), as for ``range``.
    """
    # 0 is the default of low.
    low, high = (0, *limits)[-2:]
    # 63 bits, so never negative. The remainder favours small numbers by at most range / 2 ** 63.
    return (_shifted(_hashed(key, where), 1) % (high - low) + low).to(dtype)


def any_integers(key: int, where: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return integers from 0 to the largest n up to which the dtype has all integers, like ``Tensor.random_()``."""
    if dtype == torch.bool:
        return integers(key, where, dtype, 2)
    # 2 ** 24 for float32: above it, floats skip integers.
    largest = round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max
    # One more than the largest int64 is no int64.
    if largest == _MASK >> 1:
        return _shifted(_hashed(key, where), 1).to(dtype)
    return integers(key, where, dtype, largest + 1)


def bernoulli(
    key: int, where: torch.Tensor, dtype: torch.dtype, probability: float | torch.Tensor = 0.5
) -> torch.Tensor:
    """Return zeros and ones, one for each position; a tensor ``probability`` is broadcast to the positions."""
    return (_uniform(key, where, torch.float64) < probability).to(dtype)


def poisson(key: int, where: torch.Tensor, dtype: torch.dtype, rate: torch.Tensor) -> torch.Tensor:
    """Return Poisson numbers, one for each position: the smallest k for which P(at most k) exceeds a uniform number.

    Args:
        key: 64 bits.
        where: int64 positions.
        dtype: dtype of the result.
        rate: rates in the shape of the positions; the result is NaN where a rate is negative or not finite.
    """
    number, wide = _uniform(key, where, torch.float64), rate.to(torch.float64).expand(where.shape)
    valid = (wide >= 0) & wide.isfinite()
    wide = wide.where(valid, 0.0)
    low, high = torch.zeros_like(wide), (wide + 10.0 * wide.sqrt() + 40.0).ceil()  # P(above) is below 2 ** -53
    for _ in range(_BISECTIONS):
        middle = ((low + high) / 2).floor()
        enough = torch.special.gammaincc(middle + 1.0, wide) > number
        # The smallest such k stays within [low, high].
        low, high = low.where(enough, middle + 1.0), middle.where(enough, high)
        # On a GPU, this test would make the host wait, so all steps are run.
        if not where.is_cuda and bool((low >= high).all()):
            break
    return high.where(valid, math.nan).to(dtype)


def permutation(key: int, where: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the integers 0 … n - 1 in random order, for n positions."""
    # Stable, so that equal numbers have the same order on every device.
    return _uniform(key, where, torch.float64).argsort(stable=True).to(dtype)


def _normal(key: int, where: torch.Tensor) -> torch.Tensor:
    """Return standard normal numbers, float64."""
    # Box and Muller's formula, with two keys for its two independent numbers. Its second result, by the sine, is not
    # needed: each position has numbers of its own.
    radius = (-2.0 * torch.log1p(-_uniform(mixed(key, 1), where, torch.float64))).sqrt()
    angle = _uniform(mixed(key, 2), where, torch.float64) * (2.0 * math.pi)
    return radius * angle.cos()


def _hashed(key: int, where: torch.Tensor) -> torch.Tensor:
    """Return splitmix64 of each position, with ``key`` added to its state: 64 random bits as int64."""
    # int64 in PyTorch wraps around like the unsigned words of splitmix64.
    state = where * _signed(_GOLDEN)
    state += _signed(key)
    state ^= _shifted(state, 30)
    state *= _signed(_FIRST)
    state ^= _shifted(state, 27)
    state *= _signed(_SECOND)
    return state.bitwise_xor_(_shifted(state, 31))


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Logical (unsigned) right shift."""
    # ``>>`` of a negative int64 shifts ones in from the left.
    return (words >> by).bitwise_and_((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    # PyTorch has no scalars beyond the largest int64: the same bits as a negative number.
    return word - (1 << 64) if word >> 63 else word
