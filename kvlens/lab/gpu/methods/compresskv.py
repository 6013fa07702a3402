"""CompressKV on the GPU bench (kvlens/lab/gpu/settings.py): 2048 tokens, every layer and head alike, since
nothing was calibrated for random weights."""

from __future__ import annotations

from typing import Any

from kvlens.lab.gpu.floors import StepShape
from kvlens.lab.gpu.settings import Headline, Rates, Setting, unlimited
from kvlens.methods.compresskv.method import CompressKV
from kvlens.shape import KVShape


def count_kept(context: int) -> int:
    return min(2048, context)


def overrides(context: int) -> dict[str, Any]:
    return {**CompressKV.untrained, "tokens": count_kept(context)}


def shape(kv: KVShape, context: int, rates: Rates) -> StepShape:
    return StepShape(count_kept(context), count_kept(context))


SETTINGS = (
    Setting(
        "compresskv",
        "CompressKV",
        "compresskv",
        shape,
        overrides,
        unlimited,
        about="2048 tokens, every layer and head alike",
    ),
)
HEADLINES = (
    Headline(
        "Latency flat in context: CompressKV, 128K against 8K",
        1.0,
        "step time",
        ("compresskv", 131072, 1),
        ("compresskv", 8192, 1),
    ),
)
