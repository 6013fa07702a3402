"""FreeKV on the GPU bench (kvlens/lab/gpu/settings.py): the paper's long-generation sizes, what a step moves, and
blocking recall: the same method without speculation, whose KV heads all want the same pages, as ArkVale's do."""

from __future__ import annotations

from typing import Any

from kvlens.lab.gpu.floors import StepShape, missed
from kvlens.lab.gpu.settings import Headline, Rates, Setting, unlimited
from kvlens.shape import KVShape

PAGE = 32


def fixed(context: int) -> int:
    """Tokens of sinks, and as many of the window."""
    return min(1024, context // 2) // PAGE // 2 * PAGE


def recalled(context: int) -> int:
    """Pages that each KV head selects."""
    return max(1, min(32, context // PAGE // 4))


def overrides(context: int) -> dict[str, Any]:
    tokens = 2 * fixed(context) + recalled(context) * PAGE
    return {"tokens": tokens, "sinks": fixed(context), "window": fixed(context), "page": PAGE, "dense_layers": 0}


def blocking(context: int) -> dict[str, Any]:
    return {**overrides(context), "tau": 1.0}


def shape(kv: KVShape, context: int, rates: Rates) -> StepShape:
    pages, target = context // PAGE, recalled(context)
    tokens = 2 * fixed(context) + target * PAGE
    return StepShape(
        tokens,
        tokens,
        index_bytes=pages * kv.head_token_bytes,  # a smallest and a largest key per page
        wanted=target,
        missed=missed(rates["miss"], target, pages),
        unit_tokens=PAGE,
        waited=rates.get("correction", 1.0),
    )


SETTINGS = (
    Setting(
        "freekv",
        "FreeKV",
        "freekv",
        shape,
        overrides,
        unlimited,
        {"miss": 0.3, "correction": 0.14},  # the most that the paper corrects of Llama-8B at tau 0.8
        ours=("miss",),
        sweep=tuple({"miss": miss, "correction": rate} for miss in (0.1, 0.3, 1.0) for rate in (0.0, 0.14, 0.5)),
        about="2048 tokens: 512 sinks, 512 window, 1024 recalled; corrected heads wait, the others' pages come on a "
        "second stream",
    ),
    Setting(
        "blocking",
        "Blocking recall",
        "freekv",
        shape,
        blocking,
        unlimited,
        {"miss": 0.3},
        ours=("miss",),
        sweep=tuple({"miss": miss} for miss in (0.1, 0.3, 1.0)),
        alike=True,
        about="FreeKV without speculation (tau 1): all heads want the same pages and all wait, as in ArkVale, but "
        "planned on the device",
    ),
)
HEADLINES = (
    Headline(
        "FreeKV against blocking recall (ArkVale, up to)",
        13.7,
        "step time",
        ("blocking", 32768, 1),
        ("freekv", 32768, 1),
    ),
    Headline(
        "FreeKV against blocking recall (ArkVale, up to), 8 sequences",
        13.7,
        "step time",
        ("blocking", 32768, 8),
        ("freekv", 32768, 8),
    ),
    Headline(
        "Latency flat in context: FreeKV, 128K against 8K", 1.0, "step time", ("freekv", 131072, 1), ("freekv", 8192, 1)
    ),
)
