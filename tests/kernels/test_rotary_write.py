"""Queries and keys turned as transformers turns them; tokens in their slots, and nothing else touched."""

from __future__ import annotations

import pytest
import torch

from kvlens.lab.gpu.kernels.rotary_write import Places, rotary_write, rotary_write_torch, rotary_write_triton

TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-6}
QUERIES, HEADS, SLOTS = 6, 2, 9


def drawn(batch: int, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(dim)
    angle = torch.rand(batch, dim // 2, generator=g) * 6
    qkv = torch.randn(batch, (QUERIES + 2 * HEADS) * dim, generator=g)
    return qkv.to(dtype), torch.cat((angle, angle), -1).cos().to(dtype), torch.cat((angle, angle), -1).sin().to(dtype)


def slots_of(batch: int, dim: int, dtype: torch.dtype, token_major: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [B, H, C, D] of NaN, with other numbers between the sequences."""
    size = (batch, SLOTS, HEADS, dim + 4) if token_major else (batch, HEADS, SLOTS, dim + 4)
    sides = [torch.full(size, torch.nan, dtype=dtype)[..., :dim] for _ in range(2)]
    keys, values = (side.transpose(1, 2) if token_major else side for side in sides)
    return keys, values


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_kernel_turns_and_writes_as_float64_does(
    dtype: torch.dtype, dim: int, batch: int, token_major: bool
) -> None:
    qkv, cos, sin = drawn(batch, dim, dtype)
    keys, values = slots_of(batch, dim, dtype, token_major)
    slot = torch.randint(0, SLOTS, (batch, HEADS), generator=torch.Generator().manual_seed(batch))
    steps = torch.arange(batch)
    offsets = torch.stack((steps * keys.stride(0), steps * values.stride(0)), 1) if batch > 1 else None
    q = rotary_write_triton(qkv, cos, sin, Places(keys[0], values[0], slot, offsets))
    for b in range(batch):
        wide = [x[b : b + 1].double() for x in (qkv, cos, sin)]
        exact = [x.double() for x in slots_of(1, dim, dtype, token_major)]
        target = rotary_write_torch(*wide, Places(exact[0][0], exact[1][0], slot[b : b + 1]))
        assert torch.allclose(q[b : b + 1].double(), target, atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        for written, expected in ((keys[b], exact[0][0]), (values[b], exact[1][0])):
            assert torch.allclose(
                written.double(), expected, atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype], equal_nan=True
            )
            assert int(written.isfinite().all(-1).sum()) == HEADS


def test_the_reference_is_the_rotary_embedding_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    dim = 32
    qkv, cos, sin = drawn(1, dim, torch.float32)
    keys, values = slots_of(1, dim, torch.float32, False)
    slot = torch.tensor([3, 5])
    q = rotary_write(qkv, cos, sin, keys[0], values[0], slot)
    rows = qkv.view(1, -1, 1, dim)
    expected_q, expected_k = apply_rotary_pos_emb(
        rows[:, :QUERIES], rows[:, QUERIES : QUERIES + HEADS], cos[None], sin[None]
    )
    assert torch.allclose(q, expected_q[:, :, 0], atol=1e-6)
    assert torch.allclose(keys[0][torch.arange(HEADS), slot], expected_k[0, :, 0], atol=1e-6)
    assert torch.equal(values[0][torch.arange(HEADS), slot], rows[0, QUERIES + HEADS :, 0])
