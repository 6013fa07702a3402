"""CompressKV's arithmetic, without torch: how many prompt tokens each layer keeps."""

from __future__ import annotations

import math
from collections.abc import Sequence


def allocate(errors: Sequence[float], total: int, floor: int, most: int) -> list[int]:
    """Prompt tokens of each layer (sec. 3.4): `floor` each, the rest in proportion to `errors`, no layer above `most`;
    what rounding and clipping leave over is given, token by token, to the layers of largest error first, or taken from
    those of smallest error.

    errors >= 0, one per layer, of any scale; all zero count as equal. Adds up to `total`, which must lie between
    len(errors) * floor and len(errors) * most.
    """
    layers = len(errors)
    assert layers * floor <= total <= layers * most, (layers, floor, total, most)
    scale = sum(errors)
    share = [error / scale for error in errors] if scale > 0 else [1 / layers] * layers
    spare = total - layers * floor
    tokens = [min(floor + round(part * spare), most) for part in share]
    order = sorted(range(layers), key=lambda layer: -errors[layer])
    while (left := total - sum(tokens)) != 0:
        if left > 0:
            able = [layer for layer in order if tokens[layer] < most]
        else:
            able = [layer for layer in order[::-1] if tokens[layer] > floor]
        for layer in able[: abs(left)]:
            tokens[layer] += 1 if left > 0 else -1
    return tokens


def ceiling_of(total: int, layers: int, ceiling: float, prompt_tokens: int) -> int:
    """M: the most prompt tokens of one layer, `ceiling` times the average and never more than there are."""
    return min(math.ceil(ceiling * total / layers), prompt_tokens)
