"""CompressKV's arithmetic, without torch: the most prompt tokens a layer keeps."""

from __future__ import annotations

import math


def ceiling_of(total: int, layers: int, ceiling: float, prompt_tokens: int) -> int:
    """M: the most prompt tokens of one layer, `ceiling` times the average and never more than there are."""
    return min(math.ceil(ceiling * total / layers), prompt_tokens)
