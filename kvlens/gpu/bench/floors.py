"""Floors: the least bytes a decode step of each method has to move, and the time that takes at given rates. Arithmetic,
no measurement.

A `StepShape` says what a method's step does to one (layer, sequence, KV head); `traffic` multiplies it out. Counted:
weights, keys and values attended, page tables, summaries that are scored, low-rank factors, and what comes over the bus
(read from the host, written on the device). Not counted: activations, scores, partial outputs, the new token's own keys
and values; all are far below a percent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kvlens.kernels.lowrank_bytes import factor_bytes
from kvlens.shape import KVShape

PAGE = 32
"""tokens of a page"""
SPAN, RANK = 64, 16
"""SeKV: tokens and rank of a span's factors; they fit into one transfer unit of a page"""
ROUTE = 32
"""SeKV: size d' of a routing summary"""
CHUNK = 16
"""SentKVCompress: tokens of a chunk; the paper's 14 brought to a power of two, as k4 wants"""
SINKS = 4
"""tokens before the first chunk, or span"""
CHESS_EVERY = 320
"""CHESS: steps between two selections, 10 pages of 32 tokens (the paper's average)"""


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder's dense part beside its KV sizes."""

    kv: KVShape
    hidden: int
    inner: int
    vocabulary: int

    @property
    def layer_weights(self) -> int:
        """Numbers in one layer's matrices: q, k, v, o, gate, up, down."""
        heads = (2 * self.kv.q_heads + 2 * self.kv.kv_heads) * self.kv.head_dim
        return self.hidden * (heads + 3 * self.inner)

    @property
    def weight_bytes(self) -> int:
        """What a step reads of the weights: all matrices once, and the output head; the embedding is one row."""
        return (self.kv.layers * self.layer_weights + self.hidden * self.vocabulary) * self.kv.itemsize


LLAMA_8B = Model(KVShape(32, 32, 8, 128, 2), 4096, 14336, 128256)
TINY = Model(KVShape(2, 4, 2, 128, 2), 64, 128, 256)
"""the dry run's"""


@dataclass(frozen=True)
class Rates:
    """Decisions that depend on meaning, as shares; random weights cannot make them, so they are replayed. These are the
    papers', and ours where the papers give none; what runs have recorded is in rates.py."""

    miss: float = 0.3
    """of the wanted pages, those not on the device"""
    correction: float = 0.14
    """FreeKV: of the KV heads, those corrected in a step (the most that the paper reports of Llama-8B at tau 0.8)"""
    zoom: float = 0.05
    """SeKV: of the spans, those expanded (our target rate)"""
    reuse: float = 0.7
    """SentKVCompress: of the selected tokens, those on the device (the paper's)"""

    def of(self, method: str) -> dict[str, float]:
        """Those that the method's step depends on, by name; none for a method that decides nothing by meaning, or
        recalls nothing."""
        return {name: getattr(self, name) for name in USED.get(method, ())}


USED = {
    "sekv": ("miss", "zoom"),
    "freekv": ("miss", "correction"),
    "sentkv": ("reuse",),
    "blocking": ("miss",),
    "blocking_host": ("miss",),
}
"""method -> the rates its step depends on"""


@dataclass(frozen=True)
class StepShape:
    """A method's step, per (layer, sequence, KV head). `pages`: of `page` entries, attended by k1; `scored`: places k2
    scores; `wanted`: units wished for, `missed`: units that have to come; `blocking`: the share of them that is waited
    for; `spans`: low-rank spans attended by k3; `routed`: routing summaries; `held`: pages that lie on the device
    (budget, or the whole context)."""

    method: str
    page: int
    pages: int
    held: int
    scored: int = 0
    wanted: int = 0
    missed: int = 0
    blocking: float = 1.0
    spans: int = 0
    routed: int = 0
    unit_bytes: int = 0
    """over the bus for each missed unit; 0: a page's"""
    unit_pages: int = 1
    """pages written on the device for each missed unit"""


METHODS = {
    "full": "FullKV",
    "full_offload": "FullKV in host memory",
    "streaming_llm": "StreamingLLM",
    "sekv": "SeKV",
    "chess": "CHESS",
    "freekv": "FreeKV",
    "sentkv": "SentKVCompress",
    "compresskv": "CompressKV",
    "blocking": "Blocking recall",
    "blocking_host": "Blocking recall by the host",
}
"""method -> title, in the order of tables"""
DECODE_METHODS = {
    "full": "FullKV",
    "full_sdpa": "FullKV by SDPA",
    "hf_offloaded": "transformers' offloaded cache",
    "streaming_llm": "StreamingLLM",
    "sekv": "SeKV",
    "chess": "CHESS",
    "freekv": "FreeKV",
    "sentkv": "SentKVCompress",
    "compresskv": "CompressKV",
    "blocking": "Blocking recall",
}
"""the same for whole decode steps"""
TITLES = {**METHODS, **DECODE_METHODS}


def step_shape(method: str, context: int, rates: Rates) -> StepShape:
    """The method at `context` tokens with its published settings (docs/performance.md). Raises ValueError for an
    unknown method."""
    everything = context // PAGE
    tenth = max(1, math.ceil(0.1 * everything))
    if method == "full":
        return StepShape(method, PAGE, everything, everything)
    if method == "full_offload":
        return StepShape(method, PAGE, everything, 0, missed=everything)
    if method == "streaming_llm":
        return StepShape(method, PAGE, tenth, tenth)
    if method == "compresskv":
        kept = min(2048 // PAGE, everything)
        return StepShape(method, PAGE, kept, kept)
    if method == "chess":
        return StepShape(method, PAGE, min(everything, math.ceil(0.01 * everything) + 5), everything)
    if method in ("freekv", "blocking", "blocking_host"):
        fixed, wanted = min(1024 // PAGE, everything // 2), max(1, min(32, everything // 4))
        blocking = rates.correction if method == "freekv" else 1.0
        missed = _missed(rates.miss, wanted, everything)
        return StepShape(method, PAGE, fixed + wanted, fixed + wanted, everything, wanted, missed, blocking)
    if method == "sentkv":
        chunks = context // CHUNK
        wanted = max(1, math.ceil(0.1 * chunks))
        return StepShape(method, CHUNK, wanted, wanted, chunks, wanted, _missed(1 - rates.reuse, wanted, chunks))
    if method == "sekv":
        spans = context // SPAN
        exact = max(1, min(512 // PAGE, everything // 2) + _anchor_pages(context))
        coarse = math.ceil(spans / PAGE)
        zoomed = max(1, math.ceil(rates.zoom * spans))
        missed = _missed(rates.miss, zoomed, spans)
        return StepShape(method, PAGE, exact + coarse, exact + coarse + zoomed, 0, zoomed, missed, 1.0, zoomed, spans)
    raise ValueError(f"unknown method '{method}'; known: {', '.join(METHODS)}.")


def _anchor_pages(context: int) -> int:
    """SeKV: the 2.5 % of the tokens that surprise most, as pages."""
    return math.ceil(0.025 * (context // PAGE))


def _missed(share: float, wanted: int, places: int) -> int:
    """Units that come in a step: at least one, and no more than there are beside the `wanted` ones of the step
    before."""
    return max(1, min(round(share * wanted), places - wanted))


def decode_shape(method: str, context: int, rates: Rates) -> StepShape:
    """The same of a whole step through kvlens/static. SeKV's spans are reconstructed into slots there instead of
    attended as factors, and it keeps no anchors, since what surprises random weights means nothing. Sinks and the
    step's own token are among SentKVCompress's 10 %."""
    shape = step_shape({"full_sdpa": "full", "hf_offloaded": "full_offload"}.get(method, method), context, rates)
    if method == "sentkv":
        wanted = max(1, (context // 10 - SINKS - 1) // CHUNK)
        return replace(shape, wanted=wanted, missed=_missed(1 - rates.reuse, wanted, context // CHUNK))
    if method != "sekv":
        return shape
    pages = SPAN // PAGE
    kv = LLAMA_8B.kv
    unit = factor_bytes(SPAN, RANK, RANK, kv.head_dim, kv.itemsize)
    attended, held = shape.pages - _anchor_pages(context), shape.held - _anchor_pages(context)
    return replace(
        shape,
        spans=0,
        pages=attended + pages * shape.wanted,
        held=held + (pages - 1) * shape.wanted,
        unit_bytes=unit,
        unit_pages=pages,
    )


@dataclass(frozen=True)
class Traffic:
    """Bytes of one decode step of a whole batch. `arrivals`: written on the device by what comes from the host;
    `blocking`, `background`: over the bus, waited for or not."""

    weights: int
    kv: int
    tables: int
    summaries: int
    factors: int
    arrivals: int
    blocking: int
    background: int
    resident: int
    """on the device for KV purposes, not moved: slots and summaries"""

    @property
    def device_bytes(self) -> int:
        return self.weights + self.kv + self.tables + self.summaries + self.factors + self.arrivals

    @property
    def host_bytes(self) -> int:
        return self.blocking + self.background

    def floor(self, device_rate: float, link_rate: float) -> float:
        """Seconds, rates in bytes per second. What is waited for adds to the device's time; the rest hides behind it,
        if it can."""
        return max(self.device_bytes / device_rate + self.blocking / link_rate, self.host_bytes / link_rate)


def traffic(shape: StepShape, model: Model, batch: int) -> Traffic:
    """Multiply out one (layer, sequence, KV head)."""
    kv = model.kv
    each = kv.layers * batch * kv.kv_heads
    page_bytes = shape.page * kv.head_token_bytes
    moved = each * shape.missed * (shape.unit_bytes or page_bytes)
    arrivals = each * shape.missed * shape.unit_pages * page_bytes
    # FullKV in host memory is fetched layer by layer ahead of its use: nothing but the bus decides
    offloaded = shape.method == "full_offload"
    waited = 0 if offloaded else round(shape.blocking * moved)
    buffers = 2 * moved // kv.layers if offloaded else 0
    routing = each * kv.group * shape.routed * ROUTE * kv.itemsize
    summaries = each * shape.scored * kv.head_token_bytes + routing
    return Traffic(
        model.weight_bytes,
        each * shape.pages * page_bytes,
        each * shape.pages * 8,
        summaries,
        each * shape.spans * factor_bytes(SPAN, RANK, RANK, kv.head_dim, kv.itemsize),
        arrivals,
        waited,
        moved - waited,
        each * shape.held * page_bytes + summaries + buffers,
    )
