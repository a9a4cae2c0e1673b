"""TransMIL: a transformer over all tiles, with attention by landmarks and positions by convolutions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from hyfi_core.errors import RequestError


class TransMil(nn.Module):
    """Two transformer layers over tiles and a class token, between them convolutions over tiles laid in a square.

    Shao et al., "TransMIL: Transformer based Correlated Multiple Instance Learning for Whole Slide Image
    Classification", NeurIPS 2021 (arXiv:2106.00908). Tiles are laid row by row in a square, and the first tiles
    fill its end again, so the order of tiles matters.

    Args:
        features: Length D of a feature vector.
        classes: Number K of logits.
        hidden: Width of the transformer, a multiple of ``heads``.
        heads: Heads of its attention.
        dropout: Dropout of attention outputs, in training.
    """

    def __init__(self, features: int, classes: int, hidden: int = 512, heads: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        if hidden % heads:
            raise RequestError(f"hidden is {hidden}; use a multiple of heads, {heads}")
        self.compress = nn.Sequential(nn.Linear(features, hidden), nn.ReLU())
        self.token = nn.Parameter(torch.randn(1, hidden))
        self.first, self.second = (NystromLayer(hidden, heads, dropout) for _ in range(2))
        self.positions = PositionConvolutions(hidden)
        self.norm, self.classifier = nn.LayerNorm(hidden), nn.Linear(hidden, classes)

    def forward(self, bag: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits ``(K,)`` and attention ``(N,)`` of tiles ``(N, D)``.

        Attention is that of the class token to tiles in the second layer, the mean of its heads. Like the layer, it is
        an approximation: values can be slightly below zero. They are set to 0, and the sum to 1.
        """
        tiles = self.compress(bag)
        side = math.ceil(math.sqrt(len(tiles)))
        # The end of the square is filled with the first tiles, at most 2 * side - 2 of them.
        square = torch.cat([tiles, tiles[: side * side - len(tiles)]])
        x = self.first(torch.cat([self.token, square]))
        x = self.positions(x, side)
        x, attention = self.second.with_attention(x)
        logits = self.classifier(self.norm(x[0]))
        return logits, _of_tiles(attention, len(tiles))


def _of_tiles(attention: torch.Tensor, tiles: int) -> torch.Tensor:
    """Return the token's attention to tiles ``(N,)``, from its attention to the token itself and the square."""
    once, again = attention[1 : tiles + 1], attention[tiles + 1 :]
    positive = (once + F.pad(again, (0, tiles - len(again)))).clamp(min=0)
    total = positive.sum()
    # If no value is positive, all tiles get the same attention.
    return torch.where(total > 0, positive / total.clamp(min=torch.finfo(total.dtype).tiny), 1.0 / tiles)


class NystromLayer(nn.Module):
    """``x + attention(norm(x))`` with attention by landmarks, in linear time and memory.

    Xiong et al., "Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention", AAAI 2021
    (arXiv:2102.03902): landmarks are means of m consecutive parts of queries and of keys, and::

        softmax(q kᵀ) ≈ softmax(q k̃ᵀ) · softmax(q̃ k̃ᵀ)⁺ · softmax(q̃ kᵀ)      + a convolution of v along tokens

    With as many landmarks as tokens it is exact attention (but for the pseudo-inverse, by iteration).

    Args:
        width: Width of tokens.
        heads: Number of attention heads.
        dropout: Dropout of its output, in training.
        landmarks: m; None: half of the width, as in TransMIL.
    """

    def __init__(self, width: int, heads: int, dropout: float, landmarks: int | None = None) -> None:
        super().__init__()
        self.heads, self.landmarks = heads, landmarks or max(1, width // 2)
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width, bias=False)
        self.along = nn.Conv2d(heads, heads, (33, 1), padding=(16, 0), groups=heads, bias=False)
        self.output = nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return tokens ``(n, width)``."""
        return self._attended(x)[0]

    def with_attention(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens ``(n, width)``, and the attention ``(n,)`` of the first token to all, the mean over heads."""
        result, (left, middle, right) = self._attended(x)
        first = left[:, _padding(len(x), self.landmarks), None] @ middle @ right
        return result, first.squeeze(1).mean(0)[_padding(len(x), self.landmarks) :]

    def _attended(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return tokens ``(n, width)``, and the three matrices whose product approximates the attention."""
        padding = _padding(len(x), self.landmarks)
        tokens = F.pad(self.norm(x), (0, 0, padding, 0))  # in front, so that landmarks are means of equal parts
        q, k, v = self.qkv(tokens).unflatten(1, (3, self.heads, -1)).permute(1, 2, 0, 3)
        q = q / math.sqrt(q.shape[-1])
        # A landmark is the mean of a part of the tokens.
        parts = min(self.landmarks, len(x))
        landmark_q, landmark_k = (of.unflatten(1, (parts, -1)).mean(2) for of in (q, k))
        pairs = (q, landmark_k), (landmark_q, landmark_k), (landmark_q, k)
        left, middle, right = ((queries @ keys.mT).softmax(-1) for queries, keys in pairs)
        middle = pseudo_inverse(middle)
        # The three matrices stand for the attention of all tokens to all. ``along`` is a convolution along the tokens.
        mixed = left @ (middle @ (right @ v)) + self.along(v[None])[0]
        result = x + self.output(mixed.transpose(0, 1).flatten(1))[padding:]
        return result, (left, middle, right)


def _padding(tokens: int, landmarks: int) -> int:
    """Return how many tokens to add so that landmarks divide their number."""
    return -tokens % min(landmarks, tokens)


def pseudo_inverse(x: torch.Tensor, iterations: int = 6) -> torch.Tensor:
    """Return an approximate Moore-Penrose inverse of matrices ``(…, m, m)``: equation 11 of the Nyströmformer."""
    rows, columns = x.abs().sum(-1).amax(), x.abs().sum(-2).amax()
    # From this initial value the iteration converges: the norm of x z is at most 1.
    z, one = x.mT / (rows * columns), torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    for _ in range(iterations):
        xz = x @ z
        z = 0.25 * z @ (13 * one - xz @ (15 * one - xz @ (7 * one - xz)))
    return z


class PositionConvolutions(nn.Module):
    """Adds depthwise convolutions of 7, 5 and 3 over tiles in a square: TransMIL's position encoding (PPEG).

    Args:
        width: Width of tokens.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(width, width, size, padding=size // 2, groups=width) for size in (7, 5, 3)
        )

    def forward(self, x: torch.Tensor, side: int) -> torch.Tensor:
        """Return tokens ``(1 + side², width)``; the first, the class token, is unchanged."""
        square = x[1:].T.unflatten(1, (side, side))[None]
        moved = square + sum(convolution(square) for convolution in self.convolutions)
        return torch.cat([x[:1], moved[0].flatten(1).T])
