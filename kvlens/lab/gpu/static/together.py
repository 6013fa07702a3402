"""What the sequences of a batch do in one launch: the write of their tokens, and attention where no method selects
inside a step.

Every sequence has slots of its own; a kernel finds them by how far they lie behind the first sequence's. Tables that
say what is read become rows of one tensor, which every session goes on writing as its own. Shapes: B sequences, Hq
query heads, H KV heads, G = Hq / H, C slots, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvlens.kernels.pool_attend import Live, attend_batch
from kvlens.lab.gpu.kernels.rotary_write import Places, rotary_write_triton
from kvlens.lab.gpu.static.session import StaticSession
from kvlens.methods.base import Method


class Together:
    """Launches of all sequences. `attends`: attention is among them."""

    def __init__(self, sessions: Sequence[StaticSession]) -> None:
        """The sessions' windows, and their shared tables, become parts of the batch's."""
        lead = sessions[0]
        self._lead, self._page = lead, lead.slots.page
        layers = range(lead.memory.shape.layers)
        places = [[session.place(layer)[:2] for session in sessions] for layer in layers]
        self._offsets = torch.tensor(
            [[list(map(_numbers_between, row[0], sides)) for sides in row] for row in places], device=lead.memory.device
        )
        """int64 [L, B, 2]: how far keys and values of each layer lie behind the first sequence's"""
        self._slots = [_join_slots(sessions, number) for number in range(len(lead.memory.hot.pools))]
        """by pool, int64 [B, l, H]: the slots of the step's tokens in its layers"""
        self.attends = all(_shares_attention(session) for session in sessions)
        self._live = _join_tables(sessions) if self.attends else {}

    def turn_and_write(self, layer: int, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """See kvlens.lab.gpu.static.llama.Attention."""
        keys, values, _ = self._lead.place(layer)
        pool = self._lead.memory.hot.pool(layer)
        slot = self._slots[self._lead.slots.pool_of(layer)][:, layer - pool.layers.start]
        return rotary_write_triton(qkv, cos, sin, Places(keys, values, slot, self._offsets[layer]))

    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [B, Hq, 1, D] -> attention output of the same shape."""
        keys, values, _ = self._lead.place(layer)
        live = self._live[self._lead.slots.pool_of(layer)]
        return attend_batch(q[:, :, 0], keys, values, self._offsets[layer], live, scaling, self._page)[:, :, None]


def together(sessions: Sequence[StaticSession]) -> Together | None:
    """Return what one launch does for all sessions; None where their slots differ in form, or PyTorch attends."""
    pools = [[(pool.zones, pool.keys.stride()) for pool in session.memory.hot.pools] for session in sessions]
    kernels = all(session.kernels == "triton" for session in sessions)
    alike = all(each == pools[0] for each in pools)
    return Together(sessions) if len(sessions) > 1 and kernels and alike else None


def _shares_attention(session: StaticSession) -> bool:
    """No method selects inside a step, every layer reads its pool's shared table, and no mass is asked for."""
    selects = session.method.selects_between_steps or type(session.method).select is not Method.select
    inside = selects and not session.method.selects_between_steps
    return not inside and session.ring is None and session.slots.shares_all


def _numbers_between(base: torch.Tensor, target: torch.Tensor) -> int:
    """Return how many numbers `target` begins behind `base`, in memory."""
    return (target.data_ptr() - base.data_ptr()) // base.element_size()


def _join_slots(sessions: Sequence[StaticSession], number: int) -> torch.Tensor:
    """The slots that the sessions' newest tokens take in one pool become parts of one tensor -> int64 [B, l, H], or a
    view of that size."""
    pools = [session.memory.hot.pools[number] for session in sessions]
    layers, heads = len(pools[0].layers), sessions[0].memory.shape.kv_heads
    bags = [pool.bag for pool in pools if pool.bag is not None]
    if bags:
        whole = torch.stack(bags)
        for pool, bag in zip(pools, whole, strict=True):
            pool.bag = bag
        return whole
    windows = [session.window_of(pools[0].layers.start) for session in sessions]
    whole = torch.cat([window.slot for window in windows])
    for window, slot in zip(windows, whole.split(1), strict=True):
        window.slot = slot
    return whole[:, None, None].expand(-1, layers, heads)


def _join_tables(sessions: Sequence[StaticSession]) -> dict[int, Live]:
    """The sessions' shared tables become rows of one set -> by pool, with B as first dimension."""
    by_pool = {}
    for number, table in sessions[0].slots.shared.items():
        shared = [session.slots.shared[number] for session in sessions]
        bias = None if table.bias is None else torch.stack([live.bias for live in shared if live.bias is not None])
        row = None if table.row is None else torch.stack([live.row for live in shared if live.row is not None])
        table_stack, lengths, counts = (
            torch.stack([getattr(live, name) for live in shared]) for name in ("table", "page_len", "n_page")
        )
        by_pool[number] = Live(table_stack, lengths, counts, bias, row)
        for place, session in enumerate(sessions):
            session.slots.shared[number] = Live(
                table_stack[place],
                lengths[place],
                counts[place],
                None if bias is None else bias[place],
                None if row is None else row[place],
            )
            if table.bias is not None:
                session.slots.rows_behind[number] = place * table.bias.numel()
    return by_pool
