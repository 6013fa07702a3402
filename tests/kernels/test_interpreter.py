"""The quick interpreter of tests/interpreted.py computes and refuses what Triton's own does."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled on a GPU")


@triton.jit
def _sums(x, y, out, n: tl.constexpr):
    at = tl.arange(0, n)
    tl.store(out + at, tl.load(x + at) + tl.load(y + at))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16])
def test_whole_numbers_that_overflow_are_refused(dtype: torch.dtype) -> None:
    most = torch.iinfo(dtype).max
    x, one = torch.tensor([1, 2, 3, most - 1], dtype=dtype), torch.ones(4, dtype=dtype)
    out = torch.zeros(4, dtype=dtype)
    _sums[(1,)](x, one, out, 4)
    assert out.tolist() == [2, 3, 4, most]
    with pytest.raises(Exception, match="overflow detected for operation add"):
        _sums[(1,)](x + 1, one, out, 4)


def test_a_shape_seen_before_with_another_type_is_of_that_type() -> None:
    for dtype in (torch.float32, torch.int64, torch.float16, torch.float32):
        out = torch.zeros(4, dtype=dtype)
        _sums[(1,)](torch.arange(4, dtype=dtype), torch.full((4,), 3, dtype=dtype), out, 4)
        assert out.tolist() == [3, 4, 5, 6]
