"""SentKVCompress on the GPU bench (kvlens/lab/gpu/settings.py): a tenth of the tokens, in chunks of 16: the paper's
14 brought to a power of two, as random text is marked."""

from __future__ import annotations

from typing import Any

from kvlens.lab.gpu.floors import StepShape, missed
from kvlens.lab.gpu.settings import Headline, Rates, Setting, unlimited
from kvlens.shape import KVShape

CHUNK, SINKS = 16, 4


def overrides(context: int) -> dict[str, Any]:
    return {"usage": 0.1, "length": CHUNK, "deviation": 1, "marks": "one", "sinks": SINKS}


def shape(kv: KVShape, context: int, rates: Rates) -> StepShape:
    """Sinks and the step's own token are among the tenth."""
    chunks, target = context // CHUNK, max(1, (context // 10 - SINKS - 1) // CHUNK)
    return StepShape(
        context // 10,
        context // 10,
        index_bytes=chunks * kv.head_token_bytes,  # a smallest and a largest key per chunk
        wanted=target,
        missed=missed(1 - rates["reuse"], target, chunks),
        unit_tokens=CHUNK,
    )


SETTINGS = (
    Setting(
        "sentkv",
        "SentKVCompress",
        "sentkv",
        shape,
        overrides,
        unlimited,
        {"reuse": 0.7},
        about="10 % in chunks of 16; rows of one token over the bus",
    ),
)
HEADLINES = tuple(
    Headline(
        f"SentKVCompress CPU-GPU against transformers' offloaded cache (up to){batch_words}",
        5.9,
        "step time",
        ("hf_offloaded", 32768, batch),
        ("sentkv", 32768, batch),
    )
    for batch, batch_words in ((1, ""), (8, ", 8 sequences"))
)
