"""The attention path of one decode step: per method, the kernels its step launches, in order, on random data.

A path is called by the dense part once per layer, between `begin` and `end`. What is wanted, missed and corrected is
replayed (replay.py): the scores are computed and ranked, and the ranking is dropped. `moves` off leaves plans and
transfers out, so that two timings give the time they cost. Layers have keys, values and summaries of their own; page
tables and wishes are shared.
"""

from __future__ import annotations

import math

import torch

from kvlens.gpu.bench import calls, zones
from kvlens.gpu.bench.floors import StepShape
from kvlens.gpu.bench.part import Bench
from kvlens.gpu.bench.replay import Counter, corrections, wishes
from kvlens.kernels.page_attend import Pages
from kvlens.kernels.page_moves import gather
from kvlens.kernels.page_scores import page_scores
from kvlens.kernels.recall_plan import HotPages, recall_plan
from kvlens.kernels.zone_plan import zone_plan
from kvlens.kernels.zone_torch import Source, Wishes


class Path:
    """Base: nothing is recalled. `graph`: the step can be captured."""

    graph = True
    note = ""

    def __init__(self, bench: Bench, shape: StepShape, context: int, batch: int) -> None:
        self.bench, self.shape, self.context, self.batch = bench, shape, context, batch
        self.kv = bench.model.kv
        self.moves = True

    def begin(self) -> None:
        """Before the first layer."""

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """q [B, Hq, D] -> [B, Hq, D]."""
        raise NotImplementedError

    def end(self) -> None:
        """After the last layer."""

    def recall_alone(self) -> None:
        """The step's transfers without anything else."""

    def table(self, pages: int, held: int) -> Pages:
        """`pages` places for every (sequence, KV head), all full, in the slots [b * held, (b + 1) * held)."""
        at, shape = self.bench.device.at, (self.batch, self.kv.kv_heads, pages)
        picked = torch.arange(held) if pages == held else torch.randperm(held)[:pages].sort().values
        slots = (torch.arange(self.batch)[:, None, None] * held + picked).expand(shape).int().contiguous()
        lengths = torch.full(shape, self.shape.page, dtype=torch.int32)
        return Pages(slots.to(at), lengths.to(at), torch.full(shape[:2], pages, dtype=torch.int32, device=at))

    def slots(self, count: int) -> torch.Tensor:
        """`count` token-major slots, as a run has them: [slots, H_kv, P, D]."""
        return self.bench.device.normal(count, self.shape.page, self.kv.kv_heads, self.kv.head_dim).transpose(1, 2)


class Short(Path):
    """StreamingLLM, CompressKV, CHESS: k1 over a page table, and nothing else in most steps."""

    def __init__(self, bench: Bench, shape: StepShape, context: int, batch: int) -> None:
        super().__init__(bench, shape, context, batch)
        self.pages = self.table(shape.pages, shape.held)
        self.layers = [(self.slots(batch * shape.held), self.slots(batch * shape.held)) for _ in range(self.kv.layers)]

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        return calls.k1(q, *self.layers[layer], self.pages)


class Full(Path):
    """FullKV by the fastest of k1, SDPA and flex_attention at this shape; `note` has the times of all."""

    def __init__(self, bench: Bench, shape: StepShape, context: int, batch: int) -> None:
        super().__init__(bench, shape, context, batch)
        size = (batch, self.kv.kv_heads, context, self.kv.head_dim)
        self.layers = [(bench.device.normal(*size), bench.device.normal(*size)) for _ in range(self.kv.layers)]
        self.pages = calls.full_pages(batch, self.kv.kv_heads, context, bench.device.at)
        calls_by_name = {"k1": self._k1, "SDPA": self._sdpa} | ({} if bench.dry else {"flex_attention": self._flex})
        q, times = bench.device.normal(batch, self.kv.q_heads, self.kv.head_dim), {}
        for name, call in calls_by_name.items():
            steps = [lambda layer=layer, call=call: call(layer, q) for layer in range(self.kv.layers)]  # type: ignore[misc]
            try:
                times[name] = bench.device.per_call(steps, 3 if bench.dry else 10)
            except Exception as problem:  # a library's failure leaves the others in the race
                if not bench.device.alive():
                    raise
                self.note += f"{name} failed ({type(problem).__name__}); "
        fastest = min(times, key=lambda name: times[name])
        self.attend = calls_by_name[fastest]  # type: ignore[method-assign]
        self.note += (
            f"fastest of {', '.join(f'{name} {1e6 * t:.0f} us' for name, t in times.items())} a layer: {fastest}"
        )

    def _k1(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        keys, values = self.layers[layer]
        return calls.k1(q, calls.paged(keys), calls.paged(values), self.pages)

    def _sdpa(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        return calls.sdpa(q, *self.layers[layer])

    def _flex(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        return calls.flex(q, *self.layers[layer])


class Retrieval(Path):
    """k2, topk, k5, k4, k1. FreeKV: corrected heads' pages come before the attention, the others' behind its back, by
    the end of the step; blocking recall: all come before. One softmax over sinks, window and the recalled pages' slots,
    whose table never changes."""

    def __init__(self, bench: Bench, shape: StepShape, context: int, batch: int, alike: bool = False) -> None:
        super().__init__(bench, shape, context, batch)
        at, heads, places = bench.device.at, self.kv.kv_heads, context // shape.page
        self.pages = self.table(shape.pages, shape.held)
        self.layers = [(self.slots(batch * shape.held), self.slots(batch * shape.held)) for _ in range(self.kv.layers)]
        self.bounds = [
            tuple(bench.device.normal(batch, heads, places, self.kv.head_dim) for _ in range(2)) for _ in self.layers
        ]
        self.live = torch.full((batch, heads), places, dtype=torch.int32, device=at)
        self._replay(places, alike, shape.held)

    def _replay(self, places: int, alike: bool, held: int) -> None:
        """Wishes, corrections and slots: the last ones of the `held` that each sequence has."""
        shape, at = self.shape, self.bench.device.at
        first = torch.arange(self.batch, dtype=torch.int32)[:, None, None]
        want = wishes(self.batch * self.kv.kv_heads, places, shape.wanted, shape.missed, alike).unflatten(
            1, (self.batch, -1)
        )
        self.wants = (want + first * places).to(at)
        self.counter = Counter.zero(len(want), at)
        fires = corrections(len(want), self.kv.layers, self.batch * self.kv.kv_heads, shape.blocking).unflatten(
            2, (self.batch, -1)
        )
        self.fires = fires.to(at)
        slot = first * held + (held - shape.wanted) + torch.arange(shape.wanted, dtype=torch.int32)
        each = slot.expand(self.batch, self.kv.kv_heads, shape.wanted).contiguous().to(at)
        self.hot = [HotPages.empty(each) for _ in range(self.kv.layers)]
        self.pools = by_layer(self.bench, self.batch * places, shape.page)

    def begin(self) -> None:
        self.want, self.now = self.counter.pick(self.wants), self.counter.pick(self.fires)
        self.later = 1 - self.now

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        scores = page_scores(q, *self.bounds[layer], self.live, "MeanS", 1.0)
        scores.topk(self.shape.wanted, dim=-1)
        if self.moves and self.shape.blocking:
            self.recall(layer, self.now[layer])
        out = calls.k1(q, *self.layers[layer], self.pages)
        if self.moves and self.shape.blocking < 1:
            self.bench.device.aside(lambda: self.recall(layer, self.later[layer]))
        return out

    def recall(self, layer: int, fire: torch.Tensor) -> None:
        """Plan and move the pages of the KV heads that fire."""
        plan = recall_plan(self.want, fire, self.hot[layer])
        gather(self.pools[layer], plan.unit, plan.slot, *self.layers[layer])

    def end(self) -> None:
        self.bench.device.join()
        self.counter.advance()

    def recall_alone(self) -> None:
        self.begin()
        for layer in range(self.kv.layers):
            self.recall(layer, torch.ones_like(self.now[layer]))
        self.end()


class Zoned(Retrieval):
    """As blocking recall, but planned as a static step's recall zone, since k5 plans for 128 slots at most. To the plan
    the KV heads of all sequences are those of one: page p of sequence b is page p B + b of the pool."""

    reuse_alike = False
    """every KV head reuses as many pages as the one that can reuse fewest"""

    def _replay(self, places: int, alike: bool, held: int) -> None:
        shape, at, kv = self.shape, self.bench.device.at, self.kv
        rows = self.batch * kv.kv_heads
        self.order = torch.stack([1 + torch.randperm(places) for _ in range(rows)]).to(at)
        self.window = torch.arange(shape.wanted, device=at)
        # on the device: tables of the wishes of all steps would be as large as the cache
        self.counter = Counter.zero(places // math.gcd(places, shape.missed), at)
        self.clock = torch.zeros((), dtype=torch.int64, device=at)
        self.now = torch.ones(kv.layers, rows, dtype=torch.bool, device=at)
        starts = (torch.arange(places + 1, dtype=torch.int32, device=at) - 1) * shape.page
        lengths = torch.full((places + 1,), float(shape.page), device=at)
        self.source = Source(lengths, starts, None, shape.page, 0, shape.page * kv.head_token_bytes)
        self.zones = [zones.empty(rows, places + 1, shape.wanted, shape.page, at) for _ in range(kv.layers)]
        first = torch.arange(self.batch, dtype=torch.int32, device=at).repeat_interleave(kv.kv_heads)[:, None]
        self.slot = first * held + self.window.int()
        self.pools = by_layer(self.bench, self.batch * places, shape.page)

    def begin(self) -> None:
        self.want = self.order[:, (self.counter.value * self.shape.missed + self.window) % self.order.shape[1]]

    def recall(self, layer: int, fire: torch.Tensor) -> None:
        """Where KV heads reuse alike it takes two launches to plan."""
        wishes = Wishes(self.want, None, fire, self.clock, 1, True, self.reuse_alike)
        plan = zone_plan(*self.zones[layer], wishes, self.source)
        gather(self.pools[layer], plan.unit, self.slot, *self.layers[layer])

    def end(self) -> None:
        super().end()
        self.clock.add_(1)


class Chunks(Zoned):
    """SentKVCompress: pages are its chunks."""

    reuse_alike = True


def by_layer(bench: Bench, pages: int, page: int) -> list[torch.Tensor]:
    """Each layer's part of the host pool, as pages of `page` entries; layers overlap where the pool is smaller than all
    together."""
    kv, pool = bench.model.kv, bench.pool
    pool = pool.view(-1, kv.kv_heads, 2, page, kv.head_dim)
    if pages > len(pool):
        raise MemoryError
    starts = [layer * pages % (len(pool) - pages + 1) for layer in range(kv.layers)]
    return [pool[start : start + pages] for start in starts]
