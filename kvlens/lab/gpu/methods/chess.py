"""CHESS on the GPU bench (kvlens/lab/gpu/settings.py): a hundredth of the pages, selected every ten pages of decoded
tokens. The selection is the host's work between two steps: it is in the loop's time and in no graph."""

from __future__ import annotations

import math
from typing import Any

from kvlens.lab.gpu.floors import StepShape
from kvlens.lab.gpu.settings import Headline, Rates, Setting, unlimited
from kvlens.shape import KVShape

PAGE, EVERY = 32, 10
"""tokens of a page; pages between two selections (the paper's average)"""


def overrides(context: int) -> dict[str, Any]:
    return {"page": PAGE, "trigger": "fixed", "interval": EVERY}


def shape(kv: KVShape, context: int, rates: Rates) -> StepShape:
    """The selected pages, one of sinks and four of the window."""
    pages = context // PAGE
    return StepShape(min(pages, math.ceil(0.01 * pages) + 5) * PAGE, context)


SETTINGS = (
    Setting(
        "chess",
        "CHESS",
        "chess",
        shape,
        overrides,
        unlimited,
        about="1 % of pages, 4 window, 1 sink; all KV on the device; a selection every 320 steps",
    ),
)
HEADLINES = (
    Headline("CHESS against FullKV at 32K", 4.56, "step time", ("full", 32768, 1), ("chess", 32768, 1)),
    Headline("CHESS against FullKV at 32K, 8 sequences", 4.56, "step time", ("full", 32768, 8), ("chess", 32768, 8)),
    Headline(
        "Latency flat in context: CHESS, 32K against 8K", 1.0, "step time", ("chess", 32768, 1), ("chess", 8192, 1)
    ),
)
