"""SeKV's arithmetic: which slots, tables and buffers a run needs, and what is left for expanded spans. No torch.

The budget is the peak of device-resident KV inside a step (sec. 3.3): anchors, summaries, coarse means, window and
reconstructed spans. Eq. 17 leaves out the coarse means, slot tables and staging; they are held, so they count here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvlens.kernels.lowrank_bytes import factor_bytes, raw_bytes
from kvlens.methods.sekv.params import BY_PIECE, SeKVParameters
from kvlens.methods.sekv.spans import COMPRESSED, piece_count, segment
from kvlens.refusal import Refusal
from kvlens.shape import KVShape
from kvlens.spans import Span, Surprisal
from kvlens.tiers.layout import Layout, Zones, shared_slot_bytes


@dataclass(frozen=True)
class Plan:
    """Sizes for one run. Everything but `recall` is fixed by prompt and parameters."""

    kept: int
    """slots of sinks, anchors and raw spans, with room for those of decoded blocks"""
    coarse: int
    """rows of the routing table, and, unless they are off, slots of coarse entries"""
    spans: int
    """ids, the window's included"""
    ring: int
    """slots of the window"""
    window_from: int
    longest: int
    """tokens of the longest span that can be expanded"""
    shortest: int
    """tokens of the shortest one"""
    leaves: int
    """blocks of decoded tokens that leave the window at most"""
    pieces: int
    """of spans, by which the routers mean and bound find them"""
    tail: int
    """slots of the window of a KV head that keeps every token: nothing leaves it"""
    whole: frozenset[tuple[int, int]] = frozenset()
    """(layer, KV head) that do"""

    def layout(self, params: SeKVParameters, shape: KVShape, recall: int) -> Layout:
        """With `recall` slots for expanded spans in each zone: of a KV head, a layer or the model."""
        staging = staging_bytes(params, shape, self.longest) if recall else 0
        coarse, recall_slots = (self.coarse if params.coarse else 0), (recall if params.zones == "head" else 0)
        zones, lengths = Zones(self.kept, coarse, recall_slots, self.ring), (self.shortest, self.longest)
        return Layout(
            self._divided(zones, shape) if self.whole else zones,
            self.spans,
            staging,
            self.window_from,
            whole=self.whole,
            recall_spans=lengths if recall else None,
            shared=self._shared(params, shape, recall) if recall else (),
        )

    def _shared(self, params: SeKVParameters, shape: KVShape, recall: int) -> tuple[int, ...]:
        """Slots of the zones that KV heads share. A layer whose KV heads all keep every token has none."""
        if params.zones == "model":
            return (recall,)
        sharing = [self._compressing(layer, shape) > 0 for layer in range(shape.layers)]
        return tuple(recall if shares else 0 for shares in sharing) if params.zones == "layer" else ()

    def _compressing(self, layer: int, shape: KVShape) -> int:
        """KV heads of a layer that do not keep every token."""
        return sum((layer, head) not in self.whole for head in range(shape.kv_heads))

    def with_whole(self, heads: Sequence[tuple[int, int]]) -> Plan:
        """The same where these (layer, KV head) keep every token."""
        return replace(self, whole=frozenset(heads))

    def _divided(self, zones: Zones, shape: KVShape) -> tuple[Zones | tuple[Zones, ...], ...]:
        """`zones`, and for the KV heads that keep every token theirs."""
        everything = Zones(self.window_from, 0, 0, self.tail)
        layers = [
            tuple(everything if (layer, head) in self.whole else zones for head in range(shape.kv_heads))
            for layer in range(shape.layers)
        ]
        return tuple(heads if len(set(heads)) > 1 else heads[0] for heads in layers)

    def bytes(self, params: SeKVParameters, shape: KVShape, recall: int) -> int:
        """Device bytes with `recall` slots: layout, routing tables, and a block on its way out of the window."""
        leaving = params.block * shape.token_bytes if self.leaves else 0
        return self.layout(params, shape, recall).bytes(shape) + router_bytes(params, shape, self) + leaving

    def least_recall(self, params: SeKVParameters) -> int:
        """Slots without which some span could never be expanded."""
        return 0 if params.zoom == "off" or not params.reconstruction else self.longest

    def recall_within(self, params: SeKVParameters, shape: KVShape, budget: int | None, span_tokens: int) -> int | None:
        """Slots of each zone that the budget leaves for expanded spans, at most all tokens of all spans of the zone's
        KV heads; None when it is infeasible."""
        least, heads = self.least_recall(params), shape.layers * shape.kv_heads - len(self.whole)
        each = [self._compressing(layer, shape) for layer in range(shape.layers)]
        sharers, zones = {
            "head": (1, heads),
            "layer": (max(each), sum(count > 0 for count in each)),
            "model": (heads, 1),
        }[params.zones]
        most = span_tokens * sharers if least else 0
        if budget is None:
            return most
        spare = budget - self.bytes(params, shape, least)
        slot = Zones(1, 0, 0, 0).head_bytes(shape) if params.zones == "head" else shared_slot_bytes(shape)
        return None if spare < 0 else min(most, least + spare // max(1, zones * slot))


def check_dim(params: SeKVParameters, head_dim: int) -> None:
    """Raises ValueError when the routing space would be larger than a key."""
    if params.router not in BY_PIECE and params.dim > head_dim:
        raise Refusal(
            f"sekv: dim is {params.dim}, but this model's heads have size {head_dim}: set dim to at most {head_dim}.",
            code="dim_too_large",
            dim=params.dim,
            most=head_dim,
        )


def staging_bytes(params: SeKVParameters, shape: KVShape, longest: int) -> int:
    """The largest unit that can be on its way: factors come through one buffer, raw spans go straight to their
    slots."""
    factors = factor_bytes(longest, params.max_rank, params.max_rank, shape.head_dim, shape.itemsize)
    raw = raw_bytes(longest, shape.head_dim, shape.itemsize)
    return {"raw": 0, "factors": factors, "smaller": min(factors, raw)}[params.form]


def router_bytes(params: SeKVParameters, shape: KVShape, plan: Plan) -> int:
    """Routing summaries [L, H, coarse, d'] (second term of eq. 17) or, of pieces, mean keys [L, H_kv, pieces, D]
    or two bounds each; ids and lengths of their spans; W and thresholds fitted to this prompt. Trained ones belong to
    the model, not to the cache."""
    spans, fitted = plan.coarse * (8 + 4), 4 * shape.layers
    if params.router in BY_PIECE:
        entry = shape.head_dim * shape.itemsize if params.index == "exact" else shape.head_dim + 4
        entry *= BY_PIECE[params.router]
        table = plan.pieces * (shape.layers * shape.kv_heads * entry + 8 + 4)
        return table + spans + fitted * shape.q_heads
    table = shape.layers * shape.q_heads * plan.coarse * params.dim * shape.itemsize
    if params.router == "trained":
        return table + spans
    return table + spans + fitted * (shape.kv_heads * params.dim * shape.head_dim + shape.q_heads)


def anchor_cap(params: SeKVParameters, shape: KVShape, budget: int | None) -> int | None:
    """Most anchors of the prompt: a share of the device budget."""
    return None if budget is None else int(params.anchor_share * budget) // Zones(1, 0, 0, 0).bytes(shape)


def block_anchor_cap(params: SeKVParameters) -> int:
    """Most anchors in a block of decoded tokens: one per l_max tokens."""
    return params.block // params.l_max


def whole_count(params: SeKVParameters, shape: KVShape, prompt_tokens: int, max_new: int, budget: int | None) -> int:
    """KV heads that keep every token at most: as many as their share of the device budget holds."""
    if budget is None:
        return 0
    each = Zones(prompt_tokens, 0, 0, max_new).head_bytes(shape)
    return min(shape.layers * shape.kv_heads, int(params.whole_share * budget) // each)


def plan(params: SeKVParameters, spans: Sequence[Span], prompt_tokens: int, max_new: int) -> Plan:
    """Sizes for a prompt cut into `spans` (up to where the window begins) and max_new decoded tokens."""
    window_from = spans[-1].tok_end if spans else 0
    in_window = prompt_tokens - window_from
    leaves = -(-max(0, max_new - params.block) // params.block)
    compressed = [len(span) for span in spans if span.kind in COMPRESSED]
    kept_tokens = sum(len(span) for span in spans if span.kind not in COMPRESSED)
    per_block_coarse = (
        -(-params.block // params.l_max) if params.segmentation == "chunks" else max(1, params.block // params.l_min)
    )
    per_block_kept = block_anchor_cap(params)
    if params.segmentation == "paper" or params.block < params.l_min:
        per_block_kept = params.block
    if leaves:
        kept_tokens += leaves * per_block_kept + (params.block if window_from < params.sinks else 0)
    coarse = len(compressed) + leaves * per_block_coarse
    block_spans = leaves * (params.block if params.segmentation == "paper" else per_block_coarse + per_block_kept + 1)
    longest = max([*compressed, params.block if leaves else 0])
    shortest = min([*compressed, _shortest_of_block(params, window_from) if leaves else longest])
    ring = in_window + min(params.block, max_new)
    in_blocks = piece_count(params.block, params.piece) + per_block_coarse if params.piece else per_block_coarse
    rows = sum(piece_count(tokens, params.piece) for tokens in compressed) + leaves * in_blocks
    return Plan(
        kept_tokens,
        coarse,
        len(spans) + block_spans + 2,
        ring,
        window_from,
        longest,
        shortest,
        leaves,
        rows,
        in_window + max_new,
    )


def _shortest_of_block(params: SeKVParameters, window_from: int) -> int:
    """Tokens that a compressed span of decoded tokens has at least."""
    if params.segmentation != "chunks":
        return min(params.l_min, params.block)
    return 1 if window_from < params.sinks else params.block % params.l_max or params.l_max


def drawn_bytes(params: SeKVParameters, shape: KVShape, prompt_tokens: int, max_new: int, anchors: int | None) -> int:
    """Return the device bytes of a prompt whose surprisals are not known yet: exponential ones stand in for them.
    anchors: at most; None: any number."""
    draw = random.Random(0)
    nats = [draw.expovariate(1.0) for _ in range(prompt_tokens - params.window)]
    spans = segment(params, nats, 0, Surprisal(1.0, 1.0), anchors)
    sizes = plan(params, spans, prompt_tokens, max_new)
    return sizes.bytes(params, shape, sizes.least_recall(params))
