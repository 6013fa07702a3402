"""How tokens are packed that stay on the device in few bits: pure arithmetic, no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvlens.finer import EXACT, KEYS, Finer
from kvlens.kernels.code_bytes import code_bytes
from kvlens.shape import KVShape

GROUPED, ROTATED, PRUNED, MERGED, SHARED = "grouped", "rotated", "pruned", "merged", "shared"
"""codes of neighbours with a scale and a zero; codes of randomly turned vectors with a length; exact numbers of keys,
in some channels alone; directions that two layers share; a low-rank basis that several layers share"""
LENGTH_BYTES, PLACE_BYTES, LEAST_BYTES = 2, 4, 4
"""of merged layers: a length, the row of a token that is stored exactly, a KV head's smallest angle"""
Turn = Callable[..., Any]
"""a model's rotary embedding: (keys [..., m, D], positions [m], layer, back) -> keys turned, or turned back"""
CHANNEL_BYTES = 8
"""of the number of a channel that a KV head keeps, int64"""


@dataclass(frozen=True)
class Quantised:
    """Tokens that stay on the device in few bits.

    Grouped: keys in groups of `group` tokens per channel, values in groups of `group` channels per token; each group
    has a float16 scale and zero. Rotated: every key and value by itself, with float16 lengths.
    """

    bits: int
    group: int
    residual: int
    """newest values that stay exact; of the keys, those that do not fill a block of as many tokens"""
    positions: int
    """of the whole run"""
    key_bits: tuple[int, ...] = ()
    """of each layer, instead of `bits`"""
    value_bits: tuple[int, ...] = ()
    form: str = GROUPED
    """GROUPED, ROTATED, PRUNED, MERGED or SHARED: this one packs the prompt alone, whose tokens are `positions`"""
    corrected: bool = False
    """rotated keys: one of their bits is the sign of what the others leave, under random projections"""
    seed: int = 0
    """of random directions"""
    kept_counts: tuple[tuple[int, ...], ...] = ()
    """kept prompt tokens that are packed, by layer and KV head; (): whatever leaves the window is packed"""
    channels: int = 0
    """of pruned keys: channels that every KV head keeps"""
    kept_channels: tuple[tuple[tuple[int, ...], ...], ...] = ()
    """of pruned keys: which ones, by layer and KV head; (): the prompt has not been read"""
    merged_from: int = 0
    """of merged layers: the first one; pairs follow"""
    part: float = 0.5
    """of merged layers: way from the lower one's direction to the upper one's"""
    exact_share: float = 0.0
    """of merged layers: of the tokens, those that both store exactly"""
    layers_per_group: int = 1
    """of shared layers: how many share a basis"""
    rank_k: int = 0
    """of shared layers: numbers of a token's keys in all layers of a group; fewer where the keys have no more"""
    rank_v: int = 0
    turns: bool = False
    """of shared layers: keys are packed without their rotary embedding"""
    finer: tuple[Finer, ...] = ()
    """sides of single KV heads with bits of their own"""

    @property
    def packs_prompt_alone(self) -> bool:
        """Whether decoded tokens stay as they are."""
        return self.form == SHARED

    def layer_groups(self, layers: int) -> list[range]:
        """Return the layers that share a basis, group by group."""
        step = self.layers_per_group
        return [range(layer, min(layer + step, layers)) for layer in range(0, layers, step)]

    def rank_of(self, rank: int, shape: KVShape, group: int) -> int:
        """Return the rank of a basis that so many layers share."""
        return min(rank, self.positions, group * shape.kv_heads * shape.head_dim)

    @property
    def key_groups(self) -> int:
        """Groups of tokens whose keys are packed at the end, of every KV head."""
        if self.packs_prompt_alone:
            return self.positions
        return (self.positions - 1) // self.residual * self.residual // self.group

    @property
    def packed_values(self) -> int:
        """Tokens whose values are packed at the end, of every KV head."""
        if self.packs_prompt_alone:
            return self.positions
        return max(self.positions - 1 - self.residual, 0)

    def bits_of(self, layer: int) -> tuple[int, int]:
        """Return the bits of a layer's keys and values."""
        return (
            self.key_bits[layer] if self.key_bits else self.bits,
            self.value_bits[layer] if self.value_bits else self.bits,
        )

    def rows(self, layer: int, kv_heads: int) -> tuple[int, int]:
        """Return the packed tokens of a layer, all KV heads together: keys, in whole groups, and values."""
        if not self.kept_counts:
            return kv_heads * self.key_groups * self.group, kv_heads * self.packed_values
        counts = self.kept_counts[layer]
        counts = counts if len(counts) == kv_heads else counts * kv_heads
        return sum(-(-count // self.group) * self.group for count in counts), sum(counts)

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits that codes of this form can have, for keys and for values alike."""
        return {GROUPED: (1, 2, 3, 4, 8), ROTATED: (2, 3, 4), PRUNED: (), MERGED: (), SHARED: ()}[self.form]

    def side_bytes(self, head_dim: int, side: str, bits: int) -> float:
        """Bytes of one token's key, as a share of its group's, or of its value, at so many bits a number."""
        if self.form == ROTATED and side == KEYS:
            return code_bytes(head_dim, bits - self.corrected) + (code_bytes(head_dim, 1) + 2) * self.corrected + 2
        if self.form == ROTATED:
            return code_bytes(head_dim, bits) + 2
        if side == KEYS:
            return head_dim * (code_bytes(self.group, bits) + 4) / self.group
        return code_bytes(head_dim, bits) + -(-head_dim // self.group) * 4

    def token_bytes(self, shape: KVShape, layer: int, kv_head: int) -> tuple[float, float]:
        """Bytes of one token's key, as a share of its group's, and of its value, of a KV head."""
        if self.form == MERGED:
            read = shape.head_dim * shape.itemsize + LENGTH_BYTES * self._is_merged(layer, shape.layers)
            return read, read
        if self.form == SHARED:
            group = len(next(group for group in self.layer_groups(shape.layers) if layer in group))
            ranks = [self.rank_of(rank, shape, group) for rank in (self.rank_k, self.rank_v)]
            share = 1 / shape.kv_heads + shape.head_dim / max(1, self.positions)
            return ranks[0] * share * shape.itemsize, ranks[1] * share * shape.itemsize
        if self.form == PRUNED:
            return self.channels * shape.itemsize, shape.head_dim * shape.itemsize
        bits = dict(zip("KV", self.bits_of(layer), strict=True))
        bits |= {unit.side: unit.bits for unit in self.finer if (unit.layer, unit.kv_head) == (layer, kv_head)}
        exact = shape.head_token_bytes / 2
        key, value = (
            exact if width == EXACT else self.side_bytes(shape.head_dim, side, width) for side, width in bits.items()
        )
        return key, value

    def saved(self, shape: KVShape) -> list[list[tuple[float, float]]]:
        """Return, by layer and KV head, how many bytes less than exact ones a packed key and a packed value take."""
        exact = shape.head_token_bytes / 2
        pairs = [
            [self.token_bytes(shape, layer, head) for head in range(shape.kv_heads)] for layer in range(shape.layers)
        ]
        return [[(exact - key, exact - value) for key, value in heads] for heads in pairs]

    def exact_room(self, tokens: int) -> int:
        """Return how many of the tokens of merged layers are stored exactly."""
        return math.ceil(self.exact_share * tokens)

    def _is_merged(self, layer: int, layers: int) -> bool:
        return self.merged_from <= layer < self.merged_from + (layers - self.merged_from) // 2 * 2

    def _merged_bytes(self, shape: KVShape, tokens: int) -> int:
        """Return the bytes of one KV head's keys, or values, of all layers that are merged or exact."""
        row, layers = shape.head_dim * shape.itemsize, range(shape.layers)
        pairs = sum(self._is_merged(layer, shape.layers) for layer in layers) // 2
        exact = (shape.layers - 2 * pairs) * tokens * row
        apart = self.exact_room(tokens) * (PLACE_BYTES + 2 * row)
        return exact + pairs * (tokens * (row + 2 * LENGTH_BYTES) + apart + LEAST_BYTES)

    def _shared_bytes(self, shape: KVShape) -> int:
        """Return the bytes of bases and matrices."""
        numbers = 0
        for group in self.layer_groups(shape.layers):
            columns = len(group) * shape.kv_heads * shape.head_dim
            ranks = (self.rank_of(rank, shape, len(group)) for rank in (self.rank_k, self.rank_v))
            numbers += sum(rank * (self.positions + columns) for rank in ranks)
        return numbers * shape.itemsize

    def turn_bytes(self, head_dim: int) -> int:
        """Bytes of the random directions, float32."""
        return (1 + self.corrected) * head_dim * head_dim * 4 * (self.form == ROTATED)

    def bytes(self, shape: KVShape) -> int:
        """Device bytes of codes, scales and lengths, of the random directions, and of tables: the span of each position
        int32; of kept tokens their position, span and two places int32, and a role."""
        if self.form == SHARED:
            return self._shared_bytes(shape) + self.positions * 4
        total = self.turn_bytes(shape.head_dim) + shape.layers * shape.kv_heads * self.channels * CHANNEL_BYTES
        if self.form == MERGED:
            rows = (count // shape.kv_heads for count in self.rows(0, shape.kv_heads))
            merged = sum(self._merged_bytes(shape, tokens) for tokens in rows)
            return shape.kv_heads * merged + self.key_groups * self.group * 4
        for layer in range(shape.layers):
            keys, values = (rows // shape.kv_heads for rows in self.rows(layer, shape.kv_heads))
            for head in range(shape.kv_heads):
                key, value = self.token_bytes(shape, layer, head)
                total += round(keys * key + values * value)
            if self.kept_counts:
                total += shape.kv_heads * max(self.kept_counts[layer]) * KEPT_TABLE_BYTES
        return total if self.kept_counts else total + self.key_groups * self.group * 4


KEPT_TABLE_BYTES = 4 + 4 + 1 + 4 + 4
"""of a packed kept token: position, span, role, and its places among the layer's packed keys and values"""
