"""k5: which wanted pages are in the hot slots already, which have to come, and which slots they take. On the device, so
that a decode step neither waits for the host nor breaks a CUDA graph; its unit list is what k4 moves.

Pages (or spans of one size) of one KV head. Free slots are taken first, then those whose page was wanted longest ago;
within one plan the first of the wish list counts as wanted last. Ties cannot arise, so a plan is a function of its
inputs: no atomics, no order of threads. Shapes: B sequences, H_kv KV heads, K wishes, M hot slots, M >= K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlens.kernels.choice import backend
from kvlens.kernels.compat import jit, next_power_of_two, tl

FREE = -1


@dataclass(frozen=True)
class HotPages:
    """What the slots hold, [B, H_kv, M] int32, contiguous; a plan updates `page` and `used`.

    slot: number of the slot (kernels/page_moves.py); page: the page in it, FREE: none; used: larger for pages wanted
    more recently, FREE where there is none.
    """

    slot: torch.Tensor
    page: torch.Tensor
    used: torch.Tensor

    @classmethod
    def empty(cls, slot: torch.Tensor) -> HotPages:
        return cls(slot, torch.full_like(slot, FREE), torch.full_like(slot, FREE))


@dataclass(frozen=True)
class RecallPlan:
    """slot [B, H_kv, K]: where each wanted page lies once the plan is carried out; unit [B, H_kv, K]: what to move
    there, -1 for pages that are there; victim [B, H_kv, K]: the page that gave way, -1: none had to; hits, misses [B,
    H_kv]. All int32, and -1 and 0 for KV heads that did not fire."""

    slot: torch.Tensor
    unit: torch.Tensor
    victim: torch.Tensor
    hits: torch.Tensor
    misses: torch.Tensor

    def moved_bytes(self, unit_bytes: int) -> torch.Tensor:
        """Payload that the plan's moves come to, exactly: int64 [B, H_kv]."""
        return self.misses.long() * unit_bytes


def recall_plan(requested: torch.Tensor, fire: torch.Tensor, hot: HotPages) -> RecallPlan:
    """requested [B, H_kv, K] int32: wanted pages, most wanted first, none twice, -1: no wish. fire [B, H_kv] int32: 1
    where the plan is carried out, 0: this KV head keeps everything as it is. CUDA tensors take Triton, others
    PyTorch."""
    return (recall_plan_triton if backend(requested) == "triton" else recall_plan_torch)(requested, fire, hot)


def recall_plan_torch(requested: torch.Tensor, fire: torch.Tensor, hot: HotPages) -> RecallPlan:
    """The reference, in plain steps; the kernel equals it bit for bit."""
    kv_heads = requested.shape[1]
    slot, unit, victim = (torch.full_like(requested, -1) for _ in range(3))
    hits, misses = torch.zeros_like(fire), torch.zeros_like(fire)
    for b, h in fire.nonzero().tolist():
        wanted, held, used = requested[b, h].tolist(), hot.page[b, h].tolist(), hot.used[b, h].tolist()
        newest = max(used) + 1
        candidates = sorted(
            (m for m, page in enumerate(held) if page == FREE or page not in wanted), key=lambda m: (used[m], m)
        )
        for k, page in enumerate(wanted):
            if page < 0:
                continue
            if page in held:
                m = held.index(page)
                hits[b, h] += 1
            else:
                m = candidates.pop(0)
                victim[b, h, k], unit[b, h, k] = held[m], page * kv_heads + h
                hot.page[b, h, m] = page
                misses[b, h] += 1
            hot.used[b, h, m] = newest + len(wanted) - 1 - k
            slot[b, h, k] = hot.slot[b, h, m]
    return RecallPlan(slot, unit, victim, hits, misses)


def recall_plan_triton(requested: torch.Tensor, fire: torch.Tensor, hot: HotPages) -> RecallPlan:
    """Compares all wishes with all slots, and all slots with each other: K and M up to 128 (docs/kernels.md)."""
    batch, kv_heads, wishes = requested.shape
    slots = hot.page.shape[2]
    block = next_power_of_two(slots)
    if not wishes <= slots <= 128:
        raise ValueError(
            f"the Triton kernel plans for at most 128 slots and as many wishes as slots, not {wishes} and {slots}"
        )
    assert all(x.is_contiguous() for x in (requested, fire, hot.slot, hot.page, hot.used))
    slot, unit, victim = (torch.empty_like(requested) for _ in range(3))
    hits, misses = torch.empty_like(fire), torch.empty_like(fire)
    _plan[(batch * kv_heads,)](
        requested,
        fire,
        hot.slot,
        hot.page,
        hot.used,
        slot,
        unit,
        victim,
        hits,
        misses,
        HKV=kv_heads,
        K=wishes,
        KP=next_power_of_two(wishes),
        M=slots,
        MP=block,
        num_warps=max(4, block // 16),
        enable_fp_fusion=True,
    )
    return RecallPlan(slot, unit, victim, hits, misses)


@jit
def _plan(  # type: ignore[no-untyped-def]
    want_ptr,
    fire_ptr,
    hot_slot_ptr,
    hot_page_ptr,
    hot_used_ptr,
    slot_ptr,
    unit_ptr,
    victim_ptr,
    hits_ptr,
    misses_ptr,
    HKV: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
):
    """One program per (sequence, KV head). A missing page takes the candidate whose rank equals the page's number among
    the misses."""
    bh = tl.program_id(0)
    k = tl.arange(0, KP)
    m = tl.arange(0, MP)
    is_slot = m < M
    # an int until the last compare: the interpreter refuses masks made from a scalar bool
    fire = (tl.load(fire_ptr + bh) != 0).to(tl.int32)
    requested = tl.load(want_ptr + bh * K + k, mask=k < K, other=-1)
    page = tl.load(hot_page_ptr + bh * M + m, mask=is_slot, other=-1)
    used = tl.load(hot_used_ptr + bh * M + m, mask=is_slot, other=-1)
    name = tl.load(hot_slot_ptr + bh * M + m, mask=is_slot, other=-1)
    wish = requested >= 0
    # one matrix at a time is alive (wishes x slots, slots x slots, wishes x slots), each summed once either way:
    # registers. A sum has one term at most, so it is the number of the slot or wish, counted from 1; 0: none
    same = (requested[:, None] == page[None, :]) & wish[:, None]
    hit_at = tl.sum(tl.where(same, m[None, :] + 1, 0), 1)
    stays_for = tl.sum(tl.where(same, k[:, None] + 1, 0), 0)
    miss = (wish & (hit_at == 0)).to(tl.int32)
    candidate = is_slot & (stays_for == 0)
    # among the candidates; free slots have used = -1, and the index decides between them
    before = (used[None, :] < used[:, None]) | ((used[None, :] == used[:, None]) & (m[None, :] < m[:, None]))
    rank = tl.where(candidate, tl.sum((before & candidate[None, :]).to(tl.int32), 1), -2)
    number = tl.where(miss != 0, tl.cumsum(miss, 0) - 1, -1)
    takes = number[:, None] == rank[None, :]
    lies_at = hit_at + tl.sum(tl.where(takes, m[None, :] + 1, 0), 1)
    taken_for = tl.sum(tl.where(takes, k[:, None] + 1, 0), 0)
    index = tl.maximum(lies_at - 1, 0)
    at = bh * K + k
    moves = (miss * fire) != 0
    tl.store(slot_ptr + at, tl.where((lies_at * fire) != 0, tl.gather(name, index, 0), -1), mask=k < K)
    tl.store(unit_ptr + at, tl.where(moves, requested * HKV + bh % HKV, -1), mask=k < K)
    tl.store(victim_ptr + at, tl.where(moves, tl.gather(page, index, 0), -1), mask=k < K)
    tl.store(hits_ptr + bh, tl.sum((hit_at != 0).to(tl.int32), 0) * fire)
    tl.store(misses_ptr + bh, tl.sum(miss, 0) * fire)
    page = tl.gather(requested, tl.maximum(taken_for - 1, 0), 0)
    tl.debug_barrier()  # all warps have read what is overwritten now
    tl.store(hot_page_ptr + bh * M + m, page, mask=(taken_for * fire) != 0)
    wished = taken_for + stays_for
    tl.store(hot_used_ptr + bh * M + m, tl.max(used, 0) + K + 1 - wished, mask=(wished * fire) != 0)
