"""Floors: the least bytes a decode step has to move, and the time that takes at given rates. Arithmetic, no
measurement.

A `StepShape` says what a step does for one (layer, sequence, KV head); `traffic` multiplies it out. Counted: weights,
keys and values attended, page tables, summaries that are scored, and what comes over the bus (read from the host,
written on the device). Not counted: activations, scores, partial outputs, the new token's own keys and values; all are
far below a percent.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlens.shape import KVShape

PAGE, ENTRY_BYTES = 32, 8
"""tokens that k1 reads as one page, and bytes of its entry in the tables"""


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
class StepShape:
    """What a step does for one (layer, sequence, KV head). A unit is what is wished for and moved as one."""

    attended: int
    """tokens and coarse entries"""
    held: int
    """tokens and coarse entries that lie on the device"""
    index_bytes: int = 0
    """of the summaries that are scored"""
    wanted: int = 0
    """units wished for"""
    missed: int = 0
    """units of them that have to come"""
    unit_tokens: int = 0
    """tokens that a unit is on the device"""
    unit_bytes: int = 0
    """of a unit over the bus; 0: its tokens' keys and values"""
    waited: float = 1.0
    """share of the KV heads whose units are waited for; the others' come behind the attention's back"""


def missed(share: float, wanted_count: int, units: int) -> int:
    """Units that come in a step: at least one, and no more than there are beside the `wanted_count` ones of the step
    before."""
    return max(1, min(round(share * wanted_count), units - wanted_count))


@dataclass(frozen=True)
class Traffic:
    """Bytes of one decode step of a whole batch. `arrivals`: written on the device by what comes from the host;
    `blocking`, `background`: over the bus, waited for or not."""

    weights: int
    kv: int
    tables: int
    summaries: int
    arrivals: int
    blocking: int
    background: int
    resident: int
    """on the device for KV purposes, not moved: slots and summaries"""

    @property
    def device_bytes(self) -> int:
        return self.weights + self.kv + self.tables + self.summaries + self.arrivals

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
    arrivals = each * shape.missed * shape.unit_tokens * kv.head_token_bytes
    moved = each * shape.missed * shape.unit_bytes if shape.unit_bytes else arrivals
    blocking = round(shape.waited * moved)
    return Traffic(
        model.weight_bytes,
        each * shape.attended * kv.head_token_bytes,
        each * -(-shape.attended // PAGE) * ENTRY_BYTES,
        each * shape.index_bytes,
        arrivals,
        blocking,
        moved - blocking,
        each * (shape.held * kv.head_token_bytes + shape.index_bytes),
    )
