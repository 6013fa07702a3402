"""The presses of kvpress that `benchmarks/observe_presses.py` observes: how each is made, and what it does to a key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kvpress
import numpy as np

HALF = {"compression_ratio": 0.5}
LAYERS, KV_HEADS = 3, 2


PATTERN = np.random.default_rng(0).random((LAYERS, KV_HEADS))
"""of heads, for DuoAttention"""


@dataclass(frozen=True)
class Case:
    """A press: how it is made, and what stays of a key."""

    make: Callable[[], Any]
    attention: str = "sdpa"
    alters: bool = False
    """keys or values in the cache are not the written ones"""
    decoding: bool = False
    """it works while tokens are decoded"""
    rotates: bool = False
    """positions behind the context are counted from the keys that stayed"""
    single: bool = False
    """layers keep different numbers of keys, which kvpress feeds one token at a time outside flash attention"""


def knorm(ratio: float = 0.5) -> Any:
    return kvpress.KnormPress(ratio)


def snap() -> Any:
    return kvpress.SnapKVPress(0.5, window_size=8)


def _duo_attention() -> Any:
    """With patterns that are drawn at random: the published ones are downloaded."""
    kvpress.DuoAttentionPress.load_attention_pattern = staticmethod(lambda model: (4, 16, PATTERN))
    return kvpress.DuoAttentionPress(0.5)


def decoding(kind: Any) -> Callable[[], Any]:
    return lambda: kind(knorm(0.0), compression_interval=2, target_size=100)


_CASES: dict[str, Case] = {
    "AdaKVPress": Case(lambda: kvpress.AdaKVPress(snap())),
    "BlockPress": Case(lambda: kvpress.BlockPress(knorm(), block_size=32)),
    "CAMPress": Case(lambda: kvpress.CAMPress(knorm(0.0), 2, 100), alters=True, decoding=True),
    "CURPress": Case(lambda: kvpress.CURPress(**HALF)),
    "CapPress": Case(lambda: kvpress.CapPress(**HALF)),
    "ChunkKVPress": Case(lambda: kvpress.ChunkKVPress(knorm(), chunk_length=8)),
    "ChunkPress": Case(lambda: kvpress.ChunkPress(knorm(), chunk_length=64)),
    "CompactorPress": Case(lambda: kvpress.CompactorPress(**HALF)),
    "ComposedPress": Case(lambda: kvpress.ComposedPress([snap(), kvpress.ThinKPress(0.25)]), alters=True),
    "CompressionRatioDecodingPress": Case(
        lambda: kvpress.CompressionRatioDecodingPress(knorm(0.0), 2, target_compression_ratio=0.4), decoding=True
    ),
    "CriticalAdaKVPress": Case(lambda: kvpress.CriticalAdaKVPress(snap())),
    "CriticalKVPress": Case(lambda: kvpress.CriticalKVPress(snap())),
    "DMSPress": Case(lambda: kvpress.DMSPress(knorm(), threshold=-2.5, sliding_window_size=16)),
    "DecodingPress": Case(decoding(kvpress.DecodingPress), decoding=True),
    "DuoAttentionPress": Case(_duo_attention),
    "EntropyGatedChunkKVPress": Case(lambda: kvpress.EntropyGatedChunkKVPress(knorm())),
    "ExpectedAttentionPress": Case(lambda: kvpress.ExpectedAttentionPress(**HALF)),
    "FinchPress": Case(lambda: kvpress.FinchPress(**HALF), alters=True, rotates=True),
    "KVComposePress": Case(lambda: kvpress.KVComposePress(compression_ratio=0.5), single=True),
    "KVgradPress": Case(lambda: kvpress.KVgradPress(**HALF)),
    "KVzipPress": Case(lambda: kvpress.KVzipPress(**HALF)),
    "KeyDiffPress": Case(lambda: kvpress.KeyDiffPress(**HALF)),
    "KeyRerotationPress": Case(lambda: kvpress.KeyRerotationPress(knorm()), alters=True, rotates=True),
    "KnormPress": Case(knorm),
    "LagKVPress": Case(lambda: kvpress.LagKVPress(0.5, lag_size=32)),
    "LeverageScorePress": Case(lambda: kvpress.LeverageScorePress(**HALF)),
    "MergingPress": Case(lambda: kvpress.MergingPress(knorm()), alters=True),
    "NonCausalAttnPress": Case(lambda: kvpress.NonCausalAttnPress(**HALF)),
    "ObservedAttentionPress": Case(lambda: kvpress.ObservedAttentionPress(**HALF), attention="eager"),
    "PerLayerCompressionPress": Case(lambda: kvpress.PerLayerCompressionPress(knorm(), [0.2, 0.5, 0.7]), single=True),
    "PrefillDecodingPress": Case(
        lambda: kvpress.PrefillDecodingPress(snap(), kvpress.DecodingPress(knorm(0.0), 2, 60)), decoding=True
    ),
    "PyramidKVPress": Case(lambda: kvpress.PyramidKVPress(0.5, window_size=8), single=True),
    "RandomPress": Case(lambda: kvpress.RandomPress(0.5, seed=3)),
    "SimLayerKVPress": Case(lambda: kvpress.SimLayerKVPress(0.0, 4, 32, 4)),
    "SnapKVPress": Case(snap),
    "StreamingLLMPress": Case(lambda: kvpress.StreamingLLMPress(**HALF)),
    "TOVAPress": Case(lambda: kvpress.TOVAPress(**HALF)),
    "ThinKPress": Case(lambda: kvpress.ThinKPress(0.25), alters=True),
}
DOWNLOADS = {
    "ExpectedAttentionStatsPress": "statistics of queries",
    "FastKVzipPress": "trained gates",
    "KVzapPress": "trained scorers",
    "LUKVPress": "budget curves",
    "QFilterPress": "trained filters",
    "RestoreKVPress": "trained restore tokens",
}
CASES = {name: case for name, case in _CASES.items() if hasattr(kvpress, name)}
"""those that the installed kvpress has"""
