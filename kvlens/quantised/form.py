"""How many bits the tokens of a run have on the device: pure arithmetic, no torch, so that a form can ask before
anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from kvlens.kernels.code_bytes import code_bytes
from kvlens.shape import KVShape

GROUPED, ROTATED = "grouped", "rotated"
"""codes of neighbours with a scale and a zero; codes of randomly turned vectors with a length"""

KEPT_TABLE_BYTES = 4 + 4 + 1 + 4 + 4
"""of a packed kept token: position, span, role, and its places among the layer's packed keys and values"""


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
    """GROUPED or ROTATED"""
    corrected: bool = False
    """rotated keys: one of their bits is the sign of what the others leave, under random projections"""
    seed: int = 0
    """of random directions"""
    kept_counts: tuple[tuple[int, ...], ...] = ()
    """kept prompt tokens that are packed, by layer and KV head; (): whatever leaves the window is packed"""

    @property
    def key_groups(self) -> int:
        """Groups of tokens whose keys are packed at the end, of every KV head."""
        return (self.positions - 1) // self.residual * self.residual // self.group

    @property
    def packed_values(self) -> int:
        """Tokens whose values are packed at the end, of every KV head."""
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

    def token_bytes(self, head_dim: int, layer: int = 0) -> tuple[float, int]:
        """Bytes of one token's key, as a share of its group's, and of its value."""
        keys, values = self.bits_of(layer)
        if self.form == ROTATED:
            key = code_bytes(head_dim, keys - self.corrected) + (code_bytes(head_dim, 1) + 2) * self.corrected + 2
            return key, code_bytes(head_dim, values) + 2
        key_group = head_dim * (code_bytes(self.group, keys) + 4)
        return key_group / self.group, code_bytes(head_dim, values) + -(-head_dim // self.group) * 4

    def turn_bytes(self, head_dim: int) -> int:
        """Bytes of the random directions, float32."""
        return (1 + self.corrected) * head_dim * head_dim * 4 * (self.form == ROTATED)

    def bytes(self, shape: KVShape) -> int:
        """Device bytes of codes, scales and lengths, of the random directions, and of tables: the span of each position
        int32; of kept tokens their position, span and two places int32, and a role."""
        total = self.turn_bytes(shape.head_dim)
        for layer in range(shape.layers):
            keys, values = self.rows(layer, shape.kv_heads)
            key, value = self.token_bytes(shape.head_dim, layer)
            total += round(keys * key) + values * value
            if self.kept_counts:
                total += shape.kv_heads * max(self.kept_counts[layer]) * KEPT_TABLE_BYTES
        return total if self.kept_counts else total + self.key_groups * self.group * 4
