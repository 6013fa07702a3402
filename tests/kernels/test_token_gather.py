"""Tokens out of a pool into slots: every bit arrives, nothing else is touched; the link takes one launch for many."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvlens.kernels.token_gather import gather_tokens, gather_tokens_triton
from kvlens.link import cuda_link
from kvlens.link.copies import Tokens

HEADS, SLOTS, ROWS = 3, 40, 256
BEHIND = (1, 16)
"""rows from a token's keys to its values: side by side, or a page apart"""
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def noise(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Every bit pattern: NaN with payloads, infinities and subnormal numbers too."""
    whole = torch.randint(-(2**31), 2**31, shape, generator=g, dtype=torch.int64)
    return whole.to(torch.int32).view(dtype) if dtype == torch.float32 else whole.to(torch.int16).view(dtype)


def scattered(count: int, dim: int, dtype: torch.dtype, behind: int = 1) -> Tokens:
    """Tokens anywhere in the pool, into slots anywhere; the slots of a head are token-major."""
    g = torch.Generator().manual_seed(count)
    keys, values = (noise((SLOTS, HEADS, dim), dtype, g).transpose(0, 1) for _ in range(2))
    places = torch.randperm(HEADS * SLOTS, generator=g)[:count].numpy()
    rows = torch.randint(0, ROWS - behind, (count,), generator=g).numpy()
    return Tokens(keys, values, noise((ROWS, dim), dtype, g), rows, behind, places // SLOTS, places % SLOTS)


def copied_one_by_one(tokens: Tokens) -> list[torch.Tensor]:
    """Bits of keys and of values, after each token was copied by itself."""
    sides = [tokens.keys.clone(), tokens.values.clone()]
    for row, head, slot in zip(tokens.rows, tokens.heads, tokens.slots, strict=True):
        for behind, side in zip((0, tokens.behind), sides, strict=True):
            side[head, slot] = tokens.pool[row + behind]
    return [side.contiguous().view(BITS[side.dtype]) for side in sides]


@pytest.mark.parametrize("take", [gather_tokens_triton, gather_tokens])
@pytest.mark.parametrize(("count", "dim"), [(1, 16), (17, 64), (119, 32)])
@pytest.mark.parametrize("dtype", list(BITS))
@pytest.mark.parametrize("behind", BEHIND)
def test_every_bit_arrives_and_no_other_is_touched(
    behind: int, dtype: torch.dtype, count: int, dim: int, take: object
) -> None:
    tokens = scattered(count, dim, dtype, behind)
    exact = copied_one_by_one(tokens)
    listed = torch.from_numpy(np.stack((tokens.rows, tokens.heads, tokens.slots)))
    take(tokens.pool, behind, listed, tokens.keys, tokens.values)  # type: ignore[operator]
    for side, expected in zip((tokens.keys, tokens.values), exact, strict=True):
        assert torch.equal(side.contiguous().view(BITS[dtype]), expected)


@pytest.mark.parametrize("piecewise", [False, True])
@pytest.mark.parametrize("count", [3, 119])
def test_the_link_copies_few_pieces_and_launches_once_for_many(
    count: int, piecewise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches = []

    def counting(*given: torch.Tensor) -> None:
        launches.append(given[2].shape[1])
        gather_tokens(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("kvlens.link.copies.gather_tokens", counting)
    tokens = scattered(count, 64, torch.float16)
    exact = copied_one_by_one(tokens)
    assert tokens.count_pieces() == len(list(tokens.pieces()))
    if piecewise:
        with cuda_link.copying_piecewise():
            cuda_link._work(tokens)()
    else:
        cuda_link._work(tokens)()
    assert launches == ([count] if count == 119 and not piecewise else [])
    for side, expected in zip((tokens.keys, tokens.values), exact, strict=True):
        assert torch.equal(side.contiguous().view(torch.int16), expected)
