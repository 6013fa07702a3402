"""Bias and page tables of a layer's slots: the interpreted kernels against PyTorch bit for bit, PyTorch against the
definition."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch

from kvlens.kernels import slot_tables
from kvlens.kernels.pool_attend import Live
from kvlens.kernels.slot_tables import SlotReads, slot_bias, slot_tables_torch, slot_tables_triton
from kvlens.memory.reads import CODES
from kvlens.tiers.slots import FREE, ROLE

NOWHERE = 2**30
"""span of slots that hold nothing, and numbers around the tables: never an address"""


@dataclass(frozen=True)
class Drawn:
    """The same layer twice: as the kernels get it, a part of a pool with absurd numbers around it and in its free
    slots, and clean."""

    given: SlotReads
    clean: SlotReads


def drawn(
    slots: int,
    heads: int = 2,
    group: int = 3,
    spans: int = 37,
    select: bool = True,
    parts: bool = True,
    seed: int = 0,
    count: torch.dtype = torch.int64,
) -> Drawn:
    """Every role and free slots, selectable spans and others, hot and not, read in part by some query heads; a head
    without live slots."""
    g = torch.Generator().manual_seed(seed)

    def chance(p: float, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=g) < p

    role = torch.randint(0, len(ROLE), (heads, slots), generator=g)
    role[chance(0.3, heads, slots)] = FREE
    # runs of one role, so that whole pages are dead
    for head, first in enumerate(torch.randint(0, slots, (heads,), generator=g).tolist()):
        role[head, first : first + slots // 3] = (FREE, ROLE["resident"])[head % 2]
    if heads > 1:
        role[1] = FREE
    lengths = torch.randint(1, 9, (spans,), generator=g)
    span = torch.randint(0, spans, (heads, slots), generator=g)
    starts = lengths.cumsum(0)
    position = starts[span] + (torch.rand(heads, slots, generator=g) * lengths[span]).long()
    tables = [torch.full((heads, slots + 11), NOWHERE, dtype=dtype) for dtype in (torch.int32, torch.int32)]
    wide = torch.full((heads, slots + 11), ROLE["resident"], dtype=torch.uint8)
    wide[:, 5 : 5 + slots] = role.to(torch.uint8)
    for table, numbers in zip(tables, (span, position), strict=True):
        table[:, 5 : 5 + slots] = torch.where(role == FREE, NOWHERE, numbers).int()
    logs = lengths.float().log()
    logs[~torch.isin(torch.arange(spans), span[role == ROLE["coarse"]])] = math.nan
    fine = chance(0.6, heads, group, spans) if select else None
    tokens = torch.randint(0, 9, (heads, group, spans), generator=g).to(count) if select and parts else None
    given = SlotReads(
        wide[:, 5 : 5 + slots],
        *(table[:, 5 : 5 + slots] for table in tables),
        logs,
        starts.int(),
        chance(0.7, spans),
        chance(0.7, heads, spans),
        group,
        CODES,
        fine,
        tokens,
    )
    return Drawn(given, replace(given, span=span.int(), position=position.int()))


def same(found: Live, wanted: Live) -> None:
    names = ("table", "page_len", "n_page", "bias", "row")
    for name, one, two in zip(names, found.tensors(), wanted.tensors(), strict=True):
        assert one is not None
        assert two is not None
        assert one.dtype == two.dtype
        assert torch.equal(one, two), name


@pytest.mark.parametrize("page", [1, 16, 32])
@pytest.mark.parametrize("slots", [1, 31, 32, 257, 700])
@pytest.mark.parametrize(("select", "parts"), [(False, False), (True, False), (True, True)])
def test_the_kernels_are_pytorch_bit_for_bit(page: int, slots: int, select: bool, parts: bool) -> None:
    for seed in range(2):
        case = drawn(slots, select=select, parts=parts, seed=seed)
        found = slot_tables_triton(case.given, page)
        same(found, slot_tables_torch(case.clean, page))
        assert int(found.n_page[1]) == 0, "a head without live slots"


@pytest.mark.parametrize("group", [1, 2, 4, 5, 8])
def test_groups_and_heads(group: int) -> None:
    for heads in (1, 3):
        case = drawn(150, heads, group, seed=group, count=torch.int32)
        same(slot_tables_triton(case.given, 32), slot_tables_torch(case.clean, 32))


@pytest.mark.parametrize("page", [1, 32])
def test_many_programs_per_head(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of many programs go before a page, more than are read at a time."""
    monkeypatch.setattr(slot_tables, "SLOTS", 32)
    monkeypatch.setattr(slot_tables, "PAGES", 32)
    case = drawn(32 * 40 + 7, heads=1, seed=page)
    same(slot_tables_triton(case.given, page), slot_tables_torch(case.clean, page))


def test_more_pages_than_one_program_takes() -> None:
    case = drawn(2 * slot_tables.PAGES + 300, seed=5)
    same(slot_tables_triton(case.given, 1), slot_tables_torch(case.clean, 1))


def test_selections_of_any_strides() -> None:
    """A method that chooses for the KV head hands out one row for all its query heads."""
    case = drawn(200, seed=3)
    assert case.given.fine is not None
    assert case.given.tokens is not None
    shared = case.given.fine[:, :1].expand(-1, 3, -1)
    turned = case.given.tokens.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    wanted = slot_tables_torch(replace(case.clean, fine=shared.contiguous()), 32)
    same(slot_tables_triton(replace(case.given, fine=shared, tokens=turned), 32), wanted)


def test_pytorch_is_the_definition() -> None:
    for seed, (select, parts) in enumerate(((False, False), (True, False), (True, True))):
        reads = drawn(90, select=select, parts=parts, seed=seed).clean
        bias = slot_bias(reads)
        names = {code: name for name, code in ROLE.items()}
        for h, g, c in torch.cartesian_prod(*(torch.arange(n) for n in bias.shape)).tolist():
            role, span = names.get(int(reads.role[h, c]), "free"), int(reads.span[h, c])
            fine = reads.fine is not None and bool(reads.fine[h, g, span] and reads.is_hot[h, span])
            inside = reads.tokens is None or int(reads.position[h, c] - reads.starts[span]) < int(
                reads.tokens[h, g, span]
            )
            if role == "coarse":
                wanted = -math.inf if fine else float(reads.log_lengths[span])
            elif role in ("resident", "reconstructed") and reads.fine is not None and reads.selectable[span]:
                wanted = 0.0 if fine and inside else -math.inf
            else:
                wanted = -math.inf if role == "free" else 0.0
            assert float(bias[h, g, c]) == wanted


def test_torch_compile_takes_it_as_one_operation() -> None:
    case = drawn(70)
    torch._dynamo.reset()
    compiled = torch.compile(slot_tables_triton, backend="aot_eager", fullgraph=True)(case.given, 16)
    torch._dynamo.reset()
    same(compiled, slot_tables_torch(case.clean, 16))


def test_a_page_is_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="page must be a power of two"):
        slot_tables_triton(drawn(70).given, 24)


def test_the_choice() -> None:
    case = drawn(70)
    same(slot_tables.slot_tables(case.clean, 32), slot_tables_torch(case.clean, 32))
