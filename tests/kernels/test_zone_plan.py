"""The plan of a recall zone as a kernel: over drawn sequences of steps, tables, names and moves are bit for bit those
of the torch operations, whatever stands where nobody looks."""

from __future__ import annotations

from dataclasses import fields
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlens.kernels.zone_tables import Moves, Names, Source, Wishes, ZoneTables
from kvlens.kernels.zone_torch import rounds_for, zone_plan_torch
from kvlens.lab.gpu.kernels import zone_plan as kernel
from kvlens.lab.gpu.kernels.zone_plan import zone_plan_triton

ABSURD = 1 << 30
RESIDENT, FACTORED, FREE = 2, 5, 9
MODES = ("all", "part", "equal", "never")
"""whole spans; their leading cells; leading cells and equal reuse; whole spans moved whether they are there or not"""


class Layer:
    """A zone of some KV heads, and the spans in host memory that it is wished for. Rows of the pool begin at
    `origin`."""

    def __init__(
        self, g: torch.Generator, heads: int, cells: int, lengths: list[int], page: int, factors: bool
    ) -> None:
        spans, slots, self.g = len(lengths) + 1, cells * page, g
        self.tables = ZoneTables.empty(heads, spans, cells)
        # a zone lies in the midst of a pool of slots
        pool = torch.full((2, heads, slots + 7), ABSURD, dtype=torch.int32)
        role = torch.full((heads, slots + 7), 77, dtype=torch.uint8)
        hot = torch.rand(heads, spans, generator=g) < 0.3
        self.names = Names(pool[0][:, 3:-4], pool[1][:, 3:-4], role[:, 3:-4], hot, (RESIDENT, FACTORED, FREE))
        self.names.role.fill_(FREE)
        self.pool = (pool, role)
        lies = torch.tensor([0, *lengths])
        origin = 5
        starts = (lies.cumsum(0) - lies + origin).int()
        starts[0] = -ABSURD
        packed = None
        if factors:
            units = torch.zeros(heads, spans, 4, dtype=torch.long)
            units[..., 1] = lies * (torch.rand(heads, spans, generator=g) < 0.5)
            units[..., 0] = ABSURD
            packed = units[..., 1]
        self.source = Source(lies.float(), starts, packed, page, origin, 96)
        self.source.lengths[0] = torch.nan

    def copy(self) -> Layer:
        """The same zone, and absurd numbers in cells that hold nothing and in stamps of spans that are not held."""
        other = object.__new__(Layer)
        other.tables = ZoneTables(*(table.clone() for table in self.tables.tensors()))
        pool, role = other.pool = tuple(x.clone() for x in self.pool)  # type: ignore[assignment]
        other.names = Names(
            pool[0][:, 3:-4], pool[1][:, 3:-4], role[:, 3:-4], self.names.is_hot.clone(), self.names.roles
        )
        other.source = self.source
        return other

    def poison(self) -> None:
        tables = self.tables
        for table in (tables.span, tables.offset):
            table[~tables.live] = -ABSURD
        tables.stamp[tables.held == 0] = ABSURD

    def wishes(self, mode: str, step: int, holes: float, silent: float) -> Wishes:
        heads, spans = self.tables.held.shape
        requested = torch.stack([1 + torch.randperm(spans - 1, generator=self.g) for _ in range(heads)])
        requested[torch.rand(requested.shape, generator=self.g) < holes] = -1
        requested[torch.rand(requested.shape, generator=self.g) < holes / 2] = -ABSURD
        read = None
        lengths = self.source.lengths.nan_to_num().long()
        if mode in ("part", "equal"):
            assert self.source.page == 1
            part = (torch.rand(heads, 3, spans, generator=self.g) * (lengths + 1)).long()
            read = torch.where(torch.rand(part.shape, generator=self.g) < 0.3, 0, part)
            wished = torch.zeros(heads, spans, dtype=torch.bool).scatter(1, requested.clamp(min=0), True)
            wished[:, 0] = False
            read = torch.where(wished[:, None], read, ABSURD)
        fire = torch.rand(heads, generator=self.g) >= silent
        shortest, longest = (
            (1, int(lengths.max())) if read is not None else (int(lengths[1:].min()), int(lengths.max()))
        )
        rounds = rounds_for(max(1, shortest // self.source.page), max(1, longest // self.source.page))
        return Wishes(requested, read, fire, torch.tensor(step), rounds, mode != "never", mode == "equal")


def check(layer: Layer, other: Layer, wishes: Wishes) -> Moves:
    """Plan `layer` by torch and its copy `other` by the kernel."""
    expected = zone_plan_torch(layer.tables, layer.names, wishes, layer.source)
    before = [x.clone() for x in (wishes.requested, wishes.fire, other.source.starts)]
    other.poison()
    found = zone_plan_triton(other.tables, other.names, wishes, other.source)
    for field in fields(Moves):
        mine, theirs = getattr(found, field.name), getattr(expected, field.name)
        assert (mine is None) == (theirs is None)
        assert mine is None or (mine.dtype == theirs.dtype and torch.equal(mine, theirs)), field.name
    live = layer.tables.live
    assert torch.equal(other.tables.live, live)
    for name in ("span", "offset"):
        assert torch.equal(getattr(other.tables, name)[live], getattr(layer.tables, name)[live]), name
    assert torch.equal(other.tables.held, layer.tables.held)
    held = layer.tables.held > 0
    assert torch.equal(other.tables.stamp[held], layer.tables.stamp[held])
    assert torch.equal(other.names.is_hot, layer.names.is_hot)
    for mine, theirs in zip(other.pool, layer.pool, strict=True):
        assert torch.equal(mine, theirs), "positions, spans and roles of the pool's slots, the zone's and all others"
    assert all(
        torch.equal(one, two)
        for one, two in zip(before, (wishes.requested, wishes.fire, other.source.starts), strict=True)
    )
    return found


def go(layer: Layer, mode: str, steps: int, holes: float, silent: float) -> int:
    """`steps` plans by torch and by the kernel, compared -> units moved."""
    other, moved = layer.copy(), 0
    for step in range(1, steps + 1):
        moved += int((check(layer, other, layer.wishes(mode, step, holes, silent)).unit >= 0).sum())
    return moved


@settings(max_examples=11, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 2),
    st.integers(1, 30),
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.sampled_from((*MODES, "factors")),
    st.sampled_from((8, 1024)),
    st.sampled_from((0.0, 0.4, 1.0)),
    st.sampled_from((0.0, 0.3, 1.0)),
    st.integers(0, 999),
)
def test_the_kernel_plans_what_torch_plans(
    heads: int, cells: int, lengths: list[int], mode: str, block: int, holes: float, silent: float, seed: int
) -> None:
    """Blocks of 8 end in the midst of wishes, spans and cells."""
    layer = Layer(torch.Generator().manual_seed(seed), heads, cells, lengths, 1, mode == "factors")
    with mock.patch.object(kernel, "BLOCK", block), mock.patch.object(kernel, "PROBES", 2 if seed % 3 else 8):
        go(layer, "all" if mode == "factors" else mode, 3, holes, silent)


@pytest.mark.parametrize(
    ("page", "mode"), [*((1, mode) for mode in (*MODES, "factors")), (3, "all"), (3, "factors"), (8, "never")]
)
def test_pages_and_spans_under_pressure(page: int, mode: str) -> None:
    """More wishes than cells, so that spans give way and wishes are refused at every step."""
    cells, lengths = 11, [page] * 20 if page > 1 else [2, 7, 4, 1, 12, 3, 5, 2, 6, 4]
    layer = Layer(torch.Generator().manual_seed(page), 2, cells, lengths, page, mode == "factors")
    assert go(layer, "all" if mode == "factors" else mode, 5, 0.3, 0.2) > 0
    assert (layer.tables.held.sum(1) > cells // 2).all()


def test_more_than_a_block_of_everything() -> None:
    g = torch.Generator().manual_seed(4)
    lengths = torch.randint(1, 9, (1400,), generator=g).tolist()
    layer = Layer(g, 2, 2100, lengths, 1, False)
    assert go(layer, "equal", 3, 0.4, 0.0) > 1000


def test_a_head_that_nobody_waits_for_keeps_what_it_has() -> None:
    layer = Layer(torch.Generator().manual_seed(1), 3, 9, [3, 4, 5, 2], 1, False)
    go(layer, "all", 2, 0.0, 0.0)
    before = layer.copy()
    wishes = layer.wishes("all", 3, 0.0, 0.0)
    wishes.fire[1] = False
    moves = check(layer, layer.copy(), wishes)
    assert (moves.unit[1] == -1).all()
    assert moves.bytes[1] == 0
    assert moves.bytes.tolist() == ((moves.unit >= 0).sum(1) * 96).tolist()
    assert torch.equal(layer.tables.held[1], before.tables.held[1])
    assert not torch.equal(layer.tables.held[0], before.tables.held[0])


def test_torch_compile_takes_it_as_one_operation() -> None:
    layer = Layer(torch.Generator().manual_seed(3), 2, 9, [3, 4, 5, 2], 1, True)
    plain, compiled = layer.copy(), layer.copy()
    wishes = layer.wishes("all", 1, 0.0, 0.0)
    torch._dynamo.reset()
    found = torch.compile(zone_plan_triton, backend="aot_eager", fullgraph=True)(
        compiled.tables, compiled.names, wishes, compiled.source
    )
    torch._dynamo.reset()
    expected = zone_plan_triton(plain.tables, plain.names, wishes, plain.source)
    for field in fields(Moves):
        assert torch.equal(getattr(found, field.name), getattr(expected, field.name))
    for field in fields(ZoneTables):
        assert torch.equal(getattr(compiled.tables, field.name), getattr(plain.tables, field.name))
    assert all(torch.equal(one, two) for one, two in zip(compiled.pool, plain.pool, strict=True))
    assert found.came is not None
    assert found.came.any()
