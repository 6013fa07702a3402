"""How a static step attends its slots: on CUDA by k1 over pages of the slot pool, elsewhere by PyTorch over the whole pool.

k1 reads the pages in which anybody attends anything; which those are, and how many, lies in tensors. Where nobody selects and the live
slots are the pool's first ones, there is no bias at all. Where the selection is made between steps, pages and bias are made once per
step for all layers. Shapes: H KV heads, G = Hq / H, C slots, N pages of P slots, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvlens.kernels.attend import attention_weights, decode_attention
from kvlens.kernels.choice import Backend
from kvlens.kernels.page_attend import Pages, page_attention_triton
from kvlens.memory import Memory, Selection
from kvlens.memory.bias import slot_bias
from kvlens.memory.hot import Pool, Slots

PAGE = 32
"""slots of a page at most, a power of two; 1 where instruments ask for the mass of every slot"""


@dataclass(frozen=True)
class Live:
    """What is read of a pool's slots: table, page_len int32 [H, N], n_page int32 [H] as kvlens.kernels.page_attend.Pages, and the bias
    [H, G, C] or None."""

    table: torch.Tensor
    page_len: torch.Tensor
    n_page: torch.Tensor
    bias: torch.Tensor | None

    def become(self, other: Live) -> None:
        """Take over its numbers, at the addresses of one's own."""
        for mine, new in zip((self.table, self.page_len, self.n_page, self.bias), (other.table, other.page_len, other.n_page, other.bias),
                             strict=True):  # fmt: skip
            if mine is not None and new is not None:
                mine.copy_(new)


def live_prefix(count: torch.Tensor, heads: int, slots: int, page: int) -> Live:
    """The first `count` (0-d) of the slots are read, as they are."""
    table = torch.arange(-(-slots // page), dtype=torch.int32, device=count.device).expand(heads, -1).contiguous()
    page_len = (count - table * page).clamp(0, page).int()
    return Live(table, page_len, ((count + page - 1) // page).int().expand(heads).contiguous(), None)


def live_pages(bias: torch.Tensor, page: int) -> Live:
    """Pages with a slot that some query head of the KV head attends."""
    heads, _, slots = bias.shape
    count = -(-slots // page)
    seen = torch.nn.functional.pad((bias > -torch.inf).any(1), (0, count * page - slots)).unflatten(1, (count, page)).any(2)
    numbers = torch.arange(count, dtype=torch.int32, device=bias.device).expand(heads, -1)
    place = torch.where(seen, seen.cumsum(1) - 1, count)
    table = torch.zeros(heads, count + 1, dtype=torch.int32, device=bias.device).scatter(1, place, numbers)[:, :count].contiguous()
    return Live(table, (slots - table * page).clamp(max=page).int(), seen.sum(1).int(), bias)


@torch.library.custom_op("kvlens::attend_slots", mutates_args=(), schema=(
    "(Tensor q, Tensor keys, Tensor values, Tensor table, Tensor page_len, Tensor n_page, Tensor? bias, float scaling, int page, bool mass)"
    " -> (Tensor, Tensor)"
))  # fmt: skip
def attend_slots(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, page_len: torch.Tensor, n_page: torch.Tensor,
    bias: torch.Tensor | None, scaling: float, page: int, mass: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """k1 on q [Hq, D], keys, values [H, C, D] -> output [Hq, D], mass [Hq, N] in the order of the table, or nothing.

    A custom operator, so that torch.compile takes it as one call. The pool is seen as pages without a copy; the last one may be cut
    short by the end of the pool, where page_len says so. A page's row of the bias begins where its slots do.
    """
    heads, slots, _ = keys.shape
    whole = slots // page
    paged = [x[:, : whole * page].unflatten(1, (whole, page)).transpose(0, 1) for x in (keys, values)]
    row = rows = None
    if bias is not None:
        group = bias.shape[1]
        head = torch.arange(heads, dtype=torch.int32, device=q.device)[:, None]
        row = (head * (group * slots) + table * page)[None].contiguous()
        rows = bias.as_strided((1, group, page), (1, slots, 1))
    pages = Pages(table[None], page_len[None], n_page[None], rows, row)
    found = page_attention_triton(q[None], *paged, pages, scaling, mass)
    return found.output[0], q.new_empty(0, dtype=torch.float32) if found.mass is None else found.mass[0]


@attend_slots.register_fake
def _(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor, page_len: torch.Tensor, n_page: torch.Tensor,
      bias: torch.Tensor | None, scaling: float, page: int, mass: bool) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return torch.empty_like(q), q.new_empty((q.shape[0], table.shape[1]) if mass else (0,), dtype=torch.float32)


class SlotAttention:
    """Attends for a static session. kernels: 'triton' (k1) or 'torch'; weights: whether the weight of every slot is wanted."""

    def __init__(self, memory: Memory, kernels: Backend, weights: bool, set_between_steps: bool) -> None:
        self.memory, self.kernels, self.weights = memory, kernels, weights
        smallest = min(pool.zones.slots for pool in memory.hot.pools)
        self.page = 1 if weights else 1 << (min(PAGE, smallest).bit_length() - 1)
        self._prefix = [not set_between_steps and pool.live_prefix(memory.window_start) is not None for pool in memory.hot.pools]
        self._shared: dict[int, Live] = {}
        heads, group = memory.shape.kv_heads, memory.shape.group
        for at, pool in enumerate(memory.hot.pools if kernels == "triton" else ()):
            if self._prefix[at]:
                self._shared[at] = live_prefix(torch.zeros((), dtype=torch.long, device=memory.device), heads, pool.zones.slots, self.page)
            elif set_between_steps:
                self._shared[at] = live_pages(torch.zeros(heads, group, pool.zones.slots, device=memory.device), self.page)
        self._pool_of = [at for at, pool in enumerate(memory.hot.pools) for _ in pool.layers]
        self.check()

    @property
    def bytes(self) -> int:
        """Device bytes of what is kept from layer to layer."""
        tensors = [x for live in self._shared.values() for x in (live.table, live.page_len, live.n_page, live.bias) if x is not None]
        return sum(x.numel() * x.element_size() for x in tensors)

    def check(self) -> None:
        """Between steps: what is shared by layers is alike in them."""
        for at, pool in enumerate(self.memory.hot.pools):
            if self._prefix[at]:
                assert not pool.gaps, "the live slots were a prefix of the pool, and are no more"
            elif at in self._shared:
                for table in (pool.position, pool.span, pool.role):
                    assert bool((table == table[:1]).all()), "a selection made between steps is read by layers that hold different tokens"

    # --------------------------------------------------------------------------------------------------------------- in the step
    def begin(self, position: torch.Tensor, selection: Selection | None) -> None:
        """position int64 [1] of the step's token, whose slot has been taken; selection: of all layers, where it was made between steps."""
        memory = self.memory
        for at, live in self._shared.items():
            pool = memory.hot.pools[at]
            if self._prefix[at]:
                live.become(self._first(pool, position[0]))
            else:
                slots = memory.hot.slots(pool.layers.start)
                hot = memory.is_hot[pool.layers.start]
                live.become(live_pages(slot_bias(slots, memory.spans, memory.governed, hot, memory.shape.group, selection), self.page))

    def _first(self, pool: Pool, position: torch.Tensor) -> Live:
        zones = pool.zones
        count = zones.kept + (position - pool.window_origin + 1).clamp(max=zones.window)
        return live_prefix(count, self.memory.shape.kv_heads, zones.slots, self.page)

    def attend(self, layer: int, q: torch.Tensor, selection: Selection | None,
               scaling: float) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
        """q [1, Hq, 1, D] -> output of the same shape; weights [H, G, C] where they are wanted; which slots somebody attends, bool
        [H, C], with them."""
        memory = self.memory
        slots = memory.hot.slots(layer)
        live = self._shared.get(self._pool_of[layer])
        if live is not None and (selection is None or live.bias is not None):
            return self._by_k1(q, slots, live, scaling)
        bias = slot_bias(slots, memory.spans, memory.governed, memory.is_hot[layer], memory.shape.group, selection)
        if self.kernels == "torch":
            out = decode_attention(q, slots.keys, slots.values, bias, scaling)
            weights = attention_weights(q[0, :, 0], slots.keys, bias, scaling) if self.weights else None
            return out, weights, (bias > -torch.inf).any(1) if self.weights else None
        return self._by_k1(q, slots, live_pages(bias, self.page), scaling)

    def _by_k1(self, q: torch.Tensor, slots: Slots, live: Live,
               scaling: float) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
        out, mass = attend_slots(
            q[0, :, 0], slots.keys, slots.values, live.table, live.page_len, live.n_page, live.bias, scaling, self.page, self.weights
        )
        if not self.weights:
            return out[None, :, None], None, None
        heads, group = live.table.shape[0], q.shape[1] // live.table.shape[0]
        number = live.table.long()
        real = (torch.arange(number.shape[1], device=q.device) < live.n_page[:, None]) & (live.page_len > 0)
        seen = torch.zeros_like(number).scatter_add(1, number, real.long()) > 0
        weights = torch.zeros(heads, group, number.shape[1], device=q.device)
        weights = weights.scatter_add(2, number[:, None].expand(-1, group, -1), mass.unflatten(0, (heads, group)))
        return out[None, :, None], weights, seen
