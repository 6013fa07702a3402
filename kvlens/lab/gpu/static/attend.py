"""How a static step attends its slots: on CUDA by k1 over pages of the slot pool, elsewhere by PyTorch over the whole
pool.

k1 reads the pages in which anybody attends anything; which those are, and how many, lies in tensors. Where nobody
selects and the live slots are the pool's first ones, there is no bias at all. Where the selection is made between
steps, pages and bias are made once per step for all layers. Shapes: H KV heads, G = Hq / H, C slots, N pages of P
slots, D head size.
"""

from __future__ import annotations

import torch

from kvlens.kernels.attend import attention_weights, decode_attention
from kvlens.kernels.choice import Backend
from kvlens.kernels.pool_attend import Live, attend_slots, live_pages, live_prefix, page_of
from kvlens.kernels.slot_tables import SlotReads, slot_bias, slot_tables_triton
from kvlens.memory.memory import Memory
from kvlens.memory.placement import Selection
from kvlens.memory.reads import slot_reads
from kvlens.tiers.slots import Slots


class SlotAttention:
    """Attends for a static session. kernels: 'triton' (k1) or 'torch'; weights: whether the weight of every slot is
    wanted."""

    def __init__(self, memory: Memory, kernels: Backend, weights: bool, set_between_steps: bool) -> None:
        self.memory, self.kernels, self.weights = memory, kernels, weights
        smallest = min(pool.zones.slots for pool in memory.hot.pools)
        self.page = 1 if weights else page_of(smallest)  # 1: instruments ask for the mass of every slot
        self._prefix = [
            not set_between_steps and pool.live_prefix(memory.hot.oldest) is not None for pool in memory.hot.pools
        ]
        self._in_bag = [torch.zeros((), dtype=torch.long, device=memory.device) for _ in memory.hot.pools]
        """tokens in each pool's bag, the step's own included"""
        self.shared: dict[int, Live] = {}
        """what all layers of a pool read, by the pool's number"""
        self.rows_behind: dict[int, int] = {}
        """numbers of other sequences' bias before this one's, where a batch holds it"""
        heads, group = memory.shape.kv_heads, memory.shape.group
        for number, pool in enumerate(memory.hot.pools if kernels == "triton" else ()):
            if self._prefix[number]:
                self.shared[number] = live_prefix(
                    torch.zeros((), dtype=torch.long, device=memory.device), heads, pool.zones.slots, self.page
                )
            elif set_between_steps:
                self.shared[number] = live_pages(
                    torch.zeros(heads, group, pool.zones.slots, device=memory.device), self.page
                )
        self._pool_of = [number for number, pool in enumerate(memory.hot.pools) for _ in pool.layers]
        self.check()

    @property
    def bytes(self) -> int:
        """Device bytes of what is kept from layer to layer."""
        return sum(
            x.numel() * x.element_size() for live in self.shared.values() for x in live.tensors() if x is not None
        )

    @property
    def shares_all(self) -> bool:
        """Every layer reads its pool's shared table."""
        return len(self.shared) == len(self.memory.hot.pools)

    def pool_of(self, layer: int) -> int:
        """Return the number of the pool that holds a layer."""
        return self._pool_of[layer]

    def check(self) -> None:
        """Between steps: what is shared by layers is alike in them."""
        for number, pool in enumerate(self.memory.hot.pools):
            if self._prefix[number]:
                assert not pool.gaps, "the live slots were a prefix of the pool, and are no more"
            elif number in self.shared:
                for table in (pool.position, pool.span, pool.role):
                    assert bool((table == table[:1]).all()), (
                        "a selection made between steps is read by layers that hold different tokens"
                    )

    def fed(self) -> None:
        """Between steps: the step's token has its place in every bag."""
        for pool, count in zip(self.memory.hot.pools, self._in_bag, strict=True):
            count.fill_(pool.used["window"])

    # ---- in the step
    def begin(self, position: torch.Tensor, selection: Selection | None) -> None:
        """position int64 [1] of the step's token, whose slot has been taken; selection: of all layers, where it was
        made between steps."""
        memory = self.memory
        for number, live in self.shared.items():
            pool = memory.hot.pools[number]
            if self._prefix[number]:
                live.become(self._live_prefix(number, position[0]))
            else:
                live.become(slot_tables_triton(self._reads(pool.layers.start, selection), self.page))
                if live.row is not None and self.rows_behind.get(number):
                    live.row.add_(self.rows_behind[number])

    def _live_prefix(self, number: int, position: torch.Tensor) -> Live:
        pool = self.memory.hot.pools[number]
        zones = pool.zones
        if pool.bag is None:
            count = zones.kept + (position - pool.window_origin + 1).clamp(max=zones.window)
        else:
            count = zones.kept + self._in_bag[number]
        return live_prefix(count, self.memory.shape.kv_heads, zones.slots, self.page)

    def _reads(self, layer: int, selection: Selection | None) -> SlotReads:
        memory = self.memory
        slots = memory.hot.slots(layer)
        return slot_reads(slots, memory.spans, memory.spans.is_hot[layer], memory.shape.group, selection)

    def attend(
        self, layer: int, q: torch.Tensor, selection: Selection | None, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """q [1, Hq, 1, D] -> output of the same shape; weights [H, G, C] where they are wanted; which slots somebody
        attends, bool [H, C], with them."""
        memory = self.memory
        slots = memory.hot.slots(layer)
        live = self.shared.get(self._pool_of[layer])
        if live is not None and (selection is None or live.bias is not None):
            return self._by_k1(q, slots, live, scaling)
        reads = self._reads(layer, selection)
        if self.kernels == "triton":
            return self._by_k1(q, slots, slot_tables_triton(reads, self.page), scaling)
        bias = slot_bias(reads)
        out = decode_attention(q, slots.keys, slots.values, bias, scaling)
        weights = attention_weights(q[0, :, 0], slots.keys, bias, scaling) if self.weights else None
        return out, weights, (bias > -torch.inf).any(1) if self.weights else None

    def _by_k1(
        self, q: torch.Tensor, slots: Slots, live: Live, scaling: float
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        out, mass = attend_slots(q[0, :, 0], slots.keys, slots.values, live, scaling, self.page, self.weights)
        if not self.weights:
            return out[None, :, None], None, None
        heads, group = live.table.shape[0], q.shape[1] // live.table.shape[0]
        number = live.table.long()
        real = (torch.arange(number.shape[1], device=q.device) < live.n_page[:, None]) & (live.page_len > 0)
        attended = torch.zeros_like(number).scatter_add(1, number, real.long()) > 0
        weights = torch.zeros(heads, group, number.shape[1], device=q.device)
        weights = weights.scatter_add(2, number[:, None].expand(-1, group, -1), mass.unflatten(0, (heads, group)))
        return out[None, :, None], weights, attended
