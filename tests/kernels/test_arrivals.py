"""What factors bring into a recall zone: lists and cells by the kernels are bit for bit PyTorch's, in memory that
begins poisoned."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from kvlens.lab.gpu.kernels import arrivals as kernel
from kvlens.lab.gpu.kernels.arrivals import (
    Arrivals,
    arrivals,
    arrivals_torch,
    arrivals_triton,
    fill_cells,
    fill_cells_torch,
    fill_cells_triton,
)

ABSURD = 1 << 40
HEADS, SPANS, PLACES, TOKENS, DIM = 3, 37, 9, 12, 16
CAME = ("some", "none", "all places", "a head without", "one span of all")


def drawn(what: str) -> tuple[torch.Tensor, torch.Tensor]:
    """came [H, S] and units [H, S, 4] of ragged spans and ranks; absurd numbers in the units of spans that did not
    come."""
    g = torch.Generator().manual_seed(len(what))
    if what == "one span of all":
        came = torch.ones(HEADS, 1, dtype=torch.bool)
    else:
        count = {"none": 0, "all places": PLACES}.get(what, 4)
        came = torch.stack([torch.randperm(SPANS, generator=g) < count for _ in range(HEADS)])
        came[1] &= what != "a head without"
    meta = torch.stack([torch.randint(1, size + 1, came.shape, generator=g) for size in (1000, TOKENS, 8, 5)], -1)
    return came, torch.where(came[..., None], meta, ABSURD)


@pytest.mark.parametrize("block", [4, 1024])
@pytest.mark.parametrize("what", CAME)
def test_what_came_is_listed(what: str, block: int) -> None:
    """Blocks of 4 end in the midst of spans and places."""
    came, meta = drawn(what)
    with mock.patch.object(kernel, "BLOCK", block):
        found = arrivals_triton(came, meta, PLACES, DIM, 2)
    expected = arrivals_torch(came, meta, PLACES, DIM, 2)
    for name, mine, theirs in zip(Arrivals._fields, found, expected, strict=True):
        assert mine.dtype == theirs.dtype == torch.int64
        assert torch.equal(mine, theirs), name


def test_the_list_is_what_a_loop_makes() -> None:
    came, meta = drawn("a head without")
    spans = came.shape[1]
    found = arrivals(came, meta, PLACES, DIM, 2)
    tiles, size = [], [0] * HEADS
    for h in range(HEADS):
        ids = came[h].nonzero()[:, 0].tolist()
        for place in range(PLACES):
            tiles.append([h * spans + ids[place] if place < len(ids) else -1, 0, place])
        for place, span in enumerate(ids):
            _, tokens, rank_k, rank_v = meta[h, span].tolist()
            size[h] += 2 * sum(rank * tokens + rank + rank * DIM for rank in (rank_k, rank_v))
            assert found.turn[h, span] == place
    assert found.tiles.tolist() == tiles
    assert found.bytes.tolist() == size
    assert size[1] == 0 < size[0]


def zone(what: str, g: torch.Generator) -> tuple[torch.Tensor, Arrivals, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Units, what came of them, and span, offset, fill [H, M] of a zone in which their tokens stand among cells that
    stay, in any order."""
    came, meta = drawn(what)
    listed, cells = arrivals_torch(came, meta, PLACES, DIM, 2), PLACES * TOKENS + 5
    span, offset = torch.zeros(2, HEADS, cells, dtype=torch.long)
    fill = torch.zeros(HEADS, cells, dtype=torch.bool)
    for h in range(HEADS):
        tokens = [(s, t) for s in came[h].nonzero()[:, 0].tolist() for t in range(int(meta[h, s, 1]))]
        at = torch.randperm(cells, generator=g)[: len(tokens)]
        fill[h, at] = True
        span[h, at], offset[h, at] = torch.tensor(tokens, dtype=torch.long).view(-1, 2).T
    return meta, listed, span, offset, fill


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize(
    ("what", "dtype"), [*((what, torch.float32) for what in CAME), ("some", torch.bfloat16), ("some", torch.float16)]
)
def test_tokens_come_into_their_cells(what: str, dtype: torch.dtype, token_major: bool) -> None:
    """Reconstructed spans lie place by place, as k3 writes them; what stands behind their ends is NaN."""
    g = torch.Generator().manual_seed(3)
    meta, listed, span, offset, fill = zone(what, g)
    room = torch.full((2, PLACES, HEADS, 16, DIM), torch.nan, dtype=dtype)
    for unit, _, place in listed.tiles.tolist():
        if unit >= 0:
            n = int(meta.view(-1, 4)[unit, 1])
            room[:, place, unit // meta.shape[1], :n] = torch.randn(2, n, DIM, generator=g).to(dtype)
    new = room[0].transpose(0, 1)[:, :, :TOKENS], room[1].transpose(0, 1)[:, :, :TOKENS]
    cells = fill.shape[1]
    pool = torch.randn(2, cells + 7, HEADS, DIM, generator=g).to(dtype).transpose(1, 2)
    pools = [pool.clone() if token_major else pool.clone(memory_format=torch.contiguous_format) for _ in range(2)]
    before = pool[:, :, 3:-4].clone()
    fill_cells_torch(new, listed.turn, span, offset, fill, *pools[0][:, :, 3:-4])
    wild = [torch.where(fill, x, ABSURD) for x in (span, offset)]
    came = torch.zeros_like(listed.turn, dtype=torch.bool).scatter(1, torch.where(fill, span, 0), True)
    turn = torch.where(came, listed.turn, ABSURD)
    fill_cells_triton(new, turn, *wild, fill, *pools[1][:, :, 3:-4])
    assert torch.equal(*pools)
    changed = (pools[1][:, :, 3:-4] != before).any(-1)
    assert torch.equal(changed, fill.expand(2, -1, -1))
    assert fill.any() == (what != "none")


def test_torch_compile_takes_each_as_one_operation() -> None:
    g = torch.Generator().manual_seed(5)
    meta, _, span, offset, fill = zone("some", g)
    came, _ = drawn("some")
    new = torch.randn(2, HEADS, PLACES, TOKENS, DIM, generator=g)

    def go(cells: torch.Tensor) -> torch.Tensor:
        listed = arrivals_triton(came, meta, PLACES, DIM, 2)
        fill_cells_triton((new[0], new[1]), listed.turn, span, offset, fill, cells[0], cells[1])
        return listed.bytes

    plain, compiled = torch.zeros(2, 2, HEADS, fill.shape[1], DIM)
    torch._dynamo.reset()
    found = torch.compile(go, backend="aot_eager", fullgraph=True)(compiled)
    torch._dynamo.reset()
    assert torch.equal(found, go(plain))
    assert torch.equal(compiled, plain)
    assert plain.any()


def test_cpu_tensors_take_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("arrivals_triton", "fill_cells_triton"):
        monkeypatch.setattr(kernel, name, None)
    came, meta = drawn("all places")
    listed = arrivals(came, meta, PLACES, DIM, 4)
    keys, values = torch.zeros(2, HEADS, 1, DIM)
    span = came.int().argmax(1, keepdim=True)
    new = torch.ones(HEADS, PLACES, TOKENS, DIM)
    fill_cells(
        (new, 2 * new), listed.turn, span, torch.zeros_like(span), torch.ones_like(span, dtype=torch.bool), keys, values
    )
    assert keys.sum() * 2 == values.sum() > 0
