"""Sums of columns by their codings, and the largest numbers of rows, against NumPy and against sorting."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.recording.fullattention import PIECE, Coding, find_largest, sum_by


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(1, 40 * PIECE), count=st.integers(1, 6), decimals=st.integers(1, 6))
def test_the_largest_are_those_of_sorting(seed: int, n: int, count: int, decimals: int) -> None:
    """With ties among them too; each place is named once."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.rand(2, 3, n, generator=generator).round(decimals=decimals)
    count = min(count, n)
    values, places = find_largest(rows, count)
    assert torch.equal(values, rows.sort(-1, descending=True).values[..., :count])
    assert torch.equal(values, rows.gather(-1, places))
    assert all(len(set(row.tolist())) == count for row in places.flatten(0, 1))


def test_only_what_can_be_among_the_largest_is_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    sorted_numbers: list[int] = []
    plain = torch.Tensor.topk

    def watched(tensor: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sorted_numbers.append(tensor.shape[-1])
        return plain(tensor, *options)

    monkeypatch.setattr(torch.Tensor, "topk", watched)
    find_largest(torch.rand(2, 100 * PIECE + 5), 8)
    assert sorted_numbers == [100, 8 * PIECE + 5]
    sorted_numbers.clear()
    find_largest(torch.rand(2, 60 * PIECE), 8)
    assert sorted_numbers == [60 * PIECE], "a short row"


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(1, 60), sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_columns_are_added_up_by_each_coding(seed: int, n: int, sizes: tuple[int, int]) -> None:
    """By codings that change at different columns, and of rows that lie in another order."""
    generator = np.random.default_rng(seed)
    codes = [np.repeat(generator.integers(0, size, n), generator.integers(1, 4))[:n] for size in sizes]
    rows = torch.from_numpy(generator.random((4, 3, n))).transpose(0, 1)
    tables = [torch.from_numpy(code.astype(np.int64)) for code in codes]
    for code, size, found in zip(codes, sizes, Coding(tables, sizes).sums(rows), strict=True):
        wanted = np.stack([[np.bincount(code, row, size) for row in part] for part in rows.numpy()])
        np.testing.assert_allclose(found, wanted, atol=1e-12)
        np.testing.assert_allclose(sum_by(rows, torch.from_numpy(code.astype(np.int64)), size), wanted, atol=1e-12)
