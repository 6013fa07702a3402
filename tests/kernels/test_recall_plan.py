"""k5: the kernel equals its reference bit for bit; the reference keeps what it promises and agrees with the memory's
own recall zone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlens.kernels.page_moves import gather_torch, move_triton
from kvlens.kernels.recall_plan import FREE, HotPages, RecallPlan, recall_plan, recall_plan_torch, recall_plan_triton
from kvlens.memory.recall import RecallZone

NAMES = ("slot", "unit", "victim", "hits", "misses")


def fresh(batch: int, kv_heads: int, slots: int, g: torch.Generator) -> HotPages:
    order = [torch.randperm(1000, generator=g)[:slots] for _ in range(batch * kv_heads)]
    return HotPages.empty(torch.stack(order).view(batch, kv_heads, slots).int())


def copy(hot: HotPages) -> HotPages:
    return replace(hot, page=hot.page.clone(), used=hot.used.clone())


def wishes(batch: int, kv_heads: int, count: int, pages: int, holes: float, g: torch.Generator) -> torch.Tensor:
    requested = torch.stack([torch.randperm(pages, generator=g)[:count] for _ in range(batch * kv_heads)]).view(
        batch, kv_heads, count
    )
    requested[torch.rand(requested.shape, generator=g) < holes] = -1
    return requested.int()


def check_promises(
    requested: torch.Tensor, fire: torch.Tensor, before: HotPages, after: HotPages, plan: RecallPlan
) -> None:
    for b, h in torch.cartesian_prod(*(torch.arange(x) for x in fire.shape)).tolist():
        page, old = after.page[b, h], before.page[b, h]
        if not fire[b, h]:
            assert torch.equal(page, old)
            assert torch.equal(after.used[b, h], before.used[b, h])
            assert all((getattr(plan, name)[b, h] == -1).all() for name in NAMES[:3])
            assert plan.hits[b, h] == plan.misses[b, h] == 0
            continue
        holds = page[page != FREE]
        assert len(holds.unique()) == len(holds), "no page twice"
        at = {int(slot): m for m, slot in enumerate(after.slot[b, h])}
        for k, wanted in enumerate(requested[b, h].tolist()):
            if wanted < 0:
                assert plan.slot[b, h, k] == plan.unit[b, h, k] == plan.victim[b, h, k] == -1
                continue
            m = at[int(plan.slot[b, h, k])]
            assert page[m] == wanted, "every wanted page lies where the plan says"
            if old[m] == wanted:
                assert plan.unit[b, h, k] == -1
            else:
                assert plan.unit[b, h, k] == wanted * fire.shape[1] + h
                assert plan.victim[b, h, k] == old[m]
        assert plan.misses[b, h] == (plan.unit[b, h] >= 0).sum()
        assert plan.hits[b, h] + plan.misses[b, h] == (requested[b, h] >= 0).sum()
        assert plan.moved_bytes(16384)[b, h] == 16384 * int((plan.unit[b, h] >= 0).sum())


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(0, 9),
    st.integers(1, 40),
    st.floats(0, 1),
    st.integers(0, 999),
)
def test_kernel_equals_reference_over_several_steps(
    batch: int, kv_heads: int, count: int, spare: int, pages: int, holes: float, seed: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    count = min(count, pages)
    ours = fresh(batch, kv_heads, count + spare, g)
    theirs = copy(ours)
    for _ in range(3):
        requested = wishes(batch, kv_heads, count, pages, holes, g)
        fire = torch.randint(0, 4, (batch, kv_heads), generator=g).clamp(max=1).int()
        before = copy(theirs)
        found, wanted = recall_plan_triton(requested, fire, ours), recall_plan_torch(requested, fire, theirs)
        assert all(torch.equal(getattr(found, name), getattr(wanted, name)) for name in NAMES)
        assert torch.equal(ours.page, theirs.page)
        assert torch.equal(ours.used, theirs.used)
        check_promises(requested, fire, before, theirs, wanted)


@pytest.mark.parametrize(("count", "slots"), [(64, 64), (32, 128), (128, 128)])
def test_shipped_sizes(count: int, slots: int) -> None:
    g = torch.Generator().manual_seed(0)
    ours = fresh(1, 2, slots, g)
    theirs = copy(ours)
    for _ in range(2):
        requested = wishes(1, 2, count, 300, 0.1, g)
        fire = torch.ones(1, 2, dtype=torch.int32)
        found, wanted = recall_plan_triton(requested, fire, ours), recall_plan_torch(requested, fire, theirs)
        assert all(torch.equal(getattr(found, name), getattr(wanted, name)) for name in NAMES)
        assert torch.equal(ours.page, theirs.page)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 6), st.integers(0, 6), st.integers(0, 999))
def test_pages_held_are_those_of_the_memory_s_recall_zone(count: int, spare: int, seed: int) -> None:
    """The zone on the host (kvlens/memory/recall.py) with spans of one token, over eight steps."""
    g = torch.Generator().manual_seed(seed)
    hot, zone = fresh(1, 1, count + spare, g), RecallZone(0, count + spare)
    for _ in range(8):
        requested = wishes(1, 1, count, 14, 0.2, g)
        plan = recall_plan(requested, torch.ones(1, 1, dtype=torch.int32), hot)
        host = zone.plan([(page, 1) for page in requested.flatten().tolist() if page >= 0])
        assert int(plan.hits) == len(host.hits)
        assert int(plan.misses) == len(host.misses)
        assert {page for page in plan.victim.flatten().tolist() if page != FREE} == set(host.gone)
        assert all(zone.holds(page) for page in hot.page.flatten().tolist() if page != FREE)


def test_a_plan_s_units_are_what_the_gather_moves() -> None:
    """After plan and gather every wanted page's keys and values lie in its slot, whichever implementation did
    either."""
    g = torch.Generator().manual_seed(2)
    pool = torch.randn(20, 2, 2, 16, 32, generator=g)
    slots = torch.randperm(12, generator=g).view(1, 2, 6).int()
    hot = HotPages.empty(slots)
    keys, values = (torch.full((12, 16, 2, 32), torch.nan).transpose(1, 2) for _ in range(2))
    for step in range(4):
        requested = wishes(1, 2, 5, 20, 0.2, g)
        plan = (recall_plan_triton if step % 2 else recall_plan_torch)(
            requested, torch.ones(1, 2, dtype=torch.int32), hot
        )
        if step < 2:
            gather_torch(pool, plan.unit, plan.slot, keys, values)
        else:
            move_triton(pool, plan.unit, plan.slot, keys, values, to_pool=False)
        for h in range(2):
            for page, slot in zip(requested[0, h].tolist(), plan.slot[0, h].tolist(), strict=True):
                if page >= 0:
                    assert torch.equal(torch.stack((keys[slot, h], values[slot, h])), pool[page, h])


def test_more_slots_than_the_kernel_plans_for_are_named() -> None:
    hot = HotPages.empty(torch.arange(256).view(1, 1, 256).int())
    with pytest.raises(ValueError, match="128"):
        recall_plan_triton(torch.zeros(1, 1, 4, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32), hot)


def test_cpu_tensors_take_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlens.kernels.recall_plan.recall_plan_triton", None)
    hot = HotPages.empty(torch.arange(4).view(1, 1, 4).int())
    plan = recall_plan(torch.tensor([[[7, -1]]], dtype=torch.int32), torch.ones(1, 1, dtype=torch.int32), hot)
    assert plan.slot.tolist() == [[[0, -1]]]
