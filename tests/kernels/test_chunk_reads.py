"""Tokens of ranked chunks: what one launch reads is what PyTorch reads, and what token_choice.py's sorts say."""

from __future__ import annotations

import pytest
import torch

from kvlens.kernels.chunk_reads import chunk_reads, chunk_reads_torch, chunk_reads_triton
from kvlens.methods.families.token_choice import choose

HEADS, FIRST = 3, 2


@pytest.mark.parametrize("quota", [0, 1, 40, 10_000])
@pytest.mark.parametrize("rows", [1, 37, 1500])
def test_the_kernel_is_pytorch_bit_for_bit(rows: int, quota: int) -> None:
    g = torch.Generator().manual_seed(rows)
    order = torch.rand(HEADS, rows, generator=g).argsort(1)
    order[1, rows // 2 :] = -1
    lengths, room = torch.randint(1, 17, (rows,), generator=g), torch.tensor([quota])
    expected = chunk_reads_torch(order, lengths, room, FIRST)
    for take in (chunk_reads_triton, chunk_reads):
        for found, exact in zip(take(order, lengths, room, FIRST), expected, strict=True):
            assert torch.equal(found, exact)
    assert expected.tokens.sum(1).tolist() == [min(quota, int(lengths[row[row >= 0]].sum())) for row in order]


@pytest.mark.parametrize("quota", [0, 5, 60, 1000])
def test_one_reader_chooses_what_sorts_of_every_reader_choose(quota: int) -> None:
    g = torch.Generator().manual_seed(quota)
    lengths, room = torch.randint(1, 17, (50,), generator=g), torch.tensor([quota])
    lengths[41:] = 0  # rows not in use
    score = torch.randint(-5, 5, (HEADS, 1, 50), generator=g).float()  # many are equal
    score[..., 41:] = float("-inf")
    tokens, fine, wishes = choose(score, lengths, room, FIRST, 4)
    twice = choose(score.expand(-1, 2, -1), lengths, room, FIRST, 2)
    assert torch.equal(tokens[:, :2], twice[0])
    assert torch.equal(fine[:, :2], twice[1])
    assert torch.equal(wishes, twice[2])
    assert tokens.shape[1] == 4
