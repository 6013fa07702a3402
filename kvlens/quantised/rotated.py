"""Vectors in few bits by a random rotation: the coordinates of a turned unit vector all follow one known distribution,
so that each is rounded to the nearest of a few fixed levels, and only the vector's length is stored beside the codes.

With a correction one of the bits is the sign of the remainder under a second random projection, which makes inner
products with any query right on average. Source: Zandieh et al., Online Vector Quantization with Near-optimal
Distortion Rate, arXiv 2504.19874, Algorithms 1 and 2. Shapes: h KV heads, m tokens, D head size.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch

from kvlens.kernels.code_bytes import code_bytes
from kvlens.kernels.quantise import look_up, pack, table_of
from kvlens.quantised.stored import Codes

GRID = 200_001
"""points at which the distribution of a coordinate is looked at"""
ROUNDS = 4000


@cache
def levels(size: int, bits: int) -> tuple[float, ...]:
    """Return the 2^bits levels, ascending, that lose least of one coordinate of an even random unit vector of `size`
    numbers: each is the mean of what is rounded to it (Lloyd and Max), found by turns from quantiles."""
    x = np.linspace(-1, 1, GRID)
    weight = np.zeros(GRID)
    inner = np.abs(x) < 1
    weight[inner] = np.exp((size - 3) / 2 * np.log1p(-(x[inner] ** 2)))
    mass = np.cumsum(weight) / weight.sum()
    moment = np.cumsum(weight * x) / weight.sum()
    centres = np.interp((np.arange(2**bits) + 0.5) / 2**bits, mass, x)
    for _ in range(ROUNDS):
        borders = np.concatenate([[-1.0], (centres[:-1] + centres[1:]) / 2, [1.0]])
        share, part = (np.diff(np.interp(borders, x, sums)) for sums in (mass, moment))
        centres = part / np.maximum(share, 1e-300)
    return tuple(float(centre) for centre in (centres - centres[::-1]) / 2)


def random_directions(
    size: int, corrected: bool, seed: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a random rotation [D, D] and, where keys are corrected, a Gaussian projection [D, D]; drawn on the host
    from the seed."""
    drawn = torch.Generator().manual_seed(seed)
    turn, triangle = torch.linalg.qr(torch.randn(size, size, generator=drawn, dtype=torch.float64))
    turn = turn * triangle.diagonal().sign()
    signs = torch.randn(size, size, generator=drawn, dtype=torch.float64) if corrected else None
    return turn.float().to(device), None if signs is None else signs.float().to(device)


class RotatedVectors(Codes):
    """Vectors of all layers: codes, lengths and, with a correction, signs and lengths of remainders."""

    def __init__(
        self,
        bits: list[int],
        heads: int,
        rows: list[int],
        turn: torch.Tensor,
        signs: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        """bits, rows: of each layer. signs None: no correction, all bits are the levels'."""
        self._turn, self._signs, self._dtype, size, device = turn, signs, dtype, len(turn), turn.device
        self._size = size
        self._ends = table_of(torch.tensor([-1.0, 1.0], device=device), 1)
        """the two sides of a direction"""
        self._bits = [width - (signs is not None) for width in bits]
        self._levels = [torch.tensor(levels(size, width), device=device) for width in self._bits]
        self._values = [table_of(*pair) for pair in zip(self._levels, self._bits, strict=True)]
        self._codes, self._lengths, self._sides, self._rests = [], [], [], []
        for width, count in zip(self._bits, rows, strict=True):
            self._codes.append(torch.zeros(heads, count, code_bytes(size, width), dtype=torch.uint8, device=device))
            self._lengths.append(torch.zeros(heads, count, dtype=torch.float16, device=device))
            if signs is not None:
                self._sides.append(torch.zeros(heads, count, code_bytes(size, 1), dtype=torch.uint8, device=device))
                self._rests.append(torch.zeros(heads, count, dtype=torch.float16, device=device))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*self._codes, *self._lengths, *self._sides, *self._rests)

    def put(self, layer: int, heads: slice | list[int], start: int, states: torch.Tensor) -> None:
        places = slice(start, start + states.shape[1])
        lengths = states.float().norm(dim=-1).clamp(max=torch.finfo(torch.float16).max).half()
        unit = states.float() / lengths.float().clamp(min=1e-20)[..., None]
        turned = torch.where(lengths[..., None] > 0, unit, 0.0) @ self._turn.T
        centres = self._levels[layer]
        codes = torch.bucketize(turned, (centres[:-1] + centres[1:]) / 2)
        self._codes[layer][heads, places] = pack(codes.to(torch.uint8), self._bits[layer])
        self._lengths[layer][heads, places] = lengths
        if self._signs is not None:
            rest = turned - centres[codes]
            sides = (rest @ self._signs.T >= 0).to(torch.uint8)
            self._sides[layer][heads, places] = pack(sides, 1)
            self._rests[layer][heads, places] = rest.norm(dim=-1).half()

    def get(self, layer: int, heads: slice | list[int], until: int) -> torch.Tensor:
        turned = look_up(self._codes[layer][heads, :until], self._size, self._bits[layer], self._values[layer])
        if self._signs is not None:
            sides = look_up(self._sides[layer][heads, :until], self._size, 1, self._ends)
            scale = math.sqrt(math.pi / 2) / self._size * self._rests[layer][heads, :until].float()
            turned += (sides @ self._signs).mul_(scale[..., None])
        restored = (turned @ self._turn).mul_(self._lengths[layer][heads, :until].float()[..., None])
        return restored.to(self._dtype)
