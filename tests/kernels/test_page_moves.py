"""k4: every bit arrives, nothing else is touched, both directions, both layouts."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kvlens.lab.gpu.kernels.page_moves import gather, gather_torch, move_triton, offload, offload_torch

HEADS, PAGE = 3, 16
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(BITS[x.dtype])


def noise(shape: tuple[int, ...], dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    """Every bit pattern: NaN with payloads, infinities and subnormal numbers too."""
    whole = torch.randint(-(2**31), 2**31, shape, generator=g, dtype=torch.int64)
    return whole.to(torch.int32).view(dtype) if dtype == torch.float32 else whole.to(torch.int16).view(dtype)


def slots(layout: str, dim: int, dtype: torch.dtype, g: torch.Generator) -> torch.Tensor:
    if layout == "NHD":
        return noise((8, PAGE, HEADS, dim), dtype, g).transpose(1, 2)
    return noise((8, HEADS, PAGE, dim), dtype, g)


def moves() -> tuple[torch.Tensor, torch.Tensor]:
    """Units of pages 5, 0, 3, 2 with slots 1, 4, 7, 0, in mixed order with holes; the holes' slots are absurd."""
    unit = torch.tensor([5 * 3, 5 * 3 + 1, -1, 2 * 3 + 1, 0, 5 * 3 + 2, 3 * 3 + 2, -1, -1, 3 * 3, 2 * 3])
    slot = torch.tensor([1, 1, 2**30, 0, 4, 1, 7, 2**30, -5, 7, 0])
    return unit.int(), slot.int()


@pytest.mark.parametrize("ctas", [1, 4, 40])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", list(BITS))
def test_offload_and_gather_move_every_bit_and_no_other(dtype: torch.dtype, layout: str, ctas: int) -> None:
    g = torch.Generator().manual_seed(ctas)
    dim = {1: 32, 4: 128, 40: 256}[ctas]
    keys, values = slots(layout, dim, dtype, g), slots(layout, dim, dtype, g)
    pool = noise((6, HEADS, 2, PAGE, dim), dtype, g)
    wanted_pool = bits(pool).clone()
    unit, slot = moves()
    for u, s in zip(unit.tolist(), slot.tolist(), strict=True):
        if u >= 0:
            page, h = divmod(u, HEADS)
            wanted_pool[page, h, 0], wanted_pool[page, h, 1] = bits(keys[s, h]), bits(values[s, h])
    move_triton(pool, unit, slot, keys, values, to_pool=True, ctas=ctas)
    assert torch.equal(bits(pool), wanted_pool)

    back_keys, back_values = slots(layout, dim, dtype, g), slots(layout, dim, dtype, g)
    wanted = [bits(back_keys).clone(), bits(back_values).clone()]
    for u, s in zip(unit.tolist(), slot.tolist(), strict=True):
        if u >= 0:
            wanted[0][s, u % HEADS], wanted[1][s, u % HEADS] = bits(keys[s, u % HEADS]), bits(values[s, u % HEADS])
    move_triton(pool, unit, slot, back_keys, back_values, to_pool=False, ctas=ctas)
    assert torch.equal(bits(back_keys), wanted[0])
    assert torch.equal(bits(back_values), wanted[1])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_reference_does_what_the_kernel_does(layout: str) -> None:
    g = torch.Generator().manual_seed(9)
    unit, slot = moves()
    results = []
    pool, keys, values = (
        noise((6, HEADS, 2, PAGE, 32), torch.bfloat16, g),
        *(slots(layout, 32, torch.bfloat16, g) for _ in range(2)),
    )
    for kernel in (True, False):
        there, k, v = pool.clone(), keys.clone(), values.clone()
        if kernel:
            move_triton(there, unit, slot, k, v, to_pool=True)
            move_triton(there.flip(0).contiguous(), unit, slot, k, v, to_pool=False)
        else:
            offload_torch(there, unit, slot, k, v)
            gather_torch(there.flip(0), unit, slot, k, v)
        results.append([bits(x) for x in (there, k, v)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("ctas", [1, 5])
def test_without_slots_a_units_place_in_its_row_is_its_slot(ctas: int) -> None:
    g = torch.Generator().manual_seed(ctas)
    pool, keys, values = (
        noise((6, HEADS, 2, PAGE, 32), torch.bfloat16, g),
        *(slots("NHD", 32, torch.bfloat16, g) for _ in range(2)),
    )
    unit = torch.randint(0, 6, (HEADS, 7), generator=g) * HEADS + torch.arange(HEADS)[:, None]
    unit = torch.where(torch.rand(unit.shape, generator=g) < 0.4, -1, unit).int()
    slot = torch.arange(7, dtype=torch.int32).repeat(HEADS, 1)
    results = []
    for move, given in (
        (gather_torch, slot),
        (gather_torch, None),
        (partial(move_triton, to_pool=False, ctas=ctas), None),
    ):
        k, v = keys.clone(), values.clone()
        move(pool, unit, given, k, v)
        results.append([bits(x) for x in (k, v)])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*results, strict=True))
    assert not torch.equal(results[0][0], bits(keys))


@pytest.mark.parametrize("ctas", [1, 3])
@pytest.mark.parametrize("dtype", list(BITS))
@pytest.mark.parametrize("named", [False, True])
def test_units_of_one_token_are_gathered_as_rows(named: bool, dtype: torch.dtype, ctas: int) -> None:
    g = torch.Generator().manual_seed(ctas)
    pool = noise((60, HEADS, 2, 1, 32), dtype, g)
    keys, values = (noise((41, HEADS, 1, 32), dtype, g) for _ in range(2))
    unit = torch.randint(0, 60, (HEADS, 41), generator=g) * HEADS + torch.arange(HEADS)[:, None]
    unit = torch.where(torch.rand(unit.shape, generator=g) < 0.4, -1, unit).int()
    slot = torch.rand(HEADS, 41, generator=g).argsort(1).int() if named else None
    results = []
    for move in (gather_torch, partial(move_triton, to_pool=False, ctas=ctas)):
        k, v = keys.clone(), values.clone()
        move(pool, unit, slot, k, v)
        results.append([bits(x) for x in (k, v)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(results[0][0], bits(keys))


def test_nothing_to_move() -> None:
    g = torch.Generator().manual_seed(1)
    pool, keys, values = (
        noise((2, HEADS, 2, PAGE, 32), torch.float32, g),
        *(slots("HND", 32, torch.float32, g) for _ in range(2)),
    )
    before = bits(pool).clone(), bits(keys).clone()
    none = torch.full((4,), -1, dtype=torch.int32)
    for to_pool in (True, False):
        move_triton(pool, none, none, keys, values, to_pool=to_pool)
    assert torch.equal(bits(pool), before[0])
    assert torch.equal(bits(keys), before[1])


def test_cpu_tensors_take_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlens.lab.gpu.kernels.page_moves.move_triton", None)
    pool, keys, values = torch.rand(2, 1, 2, 16, 32), torch.zeros(2, 1, 16, 32), torch.zeros(2, 1, 16, 32)
    one = torch.ones(1, dtype=torch.int32)
    gather(pool, one, one, keys, values)
    assert torch.equal(keys[1, 0], pool[1, 0, 0])
    values += 1
    offload(pool, one, one, keys, values)
    assert torch.equal(pool[1, 0, 1], values[1, 0])
