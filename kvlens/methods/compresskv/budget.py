"""CompressKV's arithmetic, without torch: how many prompt tokens each layer keeps, and what that takes on the
device."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvlens.memory.layout import SLOT_TABLE_BYTES, Layout, Zones
from kvlens.shape import KVShape


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


def layout(tokens: Sequence[int], window: int, prompt_tokens: int, max_new: int, page: int, last: int) -> Layout:
    """Layout of layers that keep `tokens` of the prompt, the last `window` of them in the window zone with everything
    decoded.

    prompt_tokens: those that prefill covered. last: 1 when the token after them, which step 0 feeds, is counted in
    `tokens` and `window`, else 0; its slot is in either case the first of the `max_new`. When every layer keeps the
    whole prompt the layout is FullKV's: all that prefill covered in the kept zone.
    """
    whole = prompt_tokens + last
    inside = 0 if min(tokens) >= whole else max(min(window, whole) - last, 0)
    zones = tuple(Zones(kept - last - inside, 0, 0, inside + max_new) for kept in tokens)
    return Layout(zones, -(-prompt_tokens // page) + 1, window_from=prompt_tokens - inside)


def affordable(budget: int, shape: KVShape, floor: int, prompt_tokens: int, max_new: int, page: int, last: int) -> int:
    """Prompt tokens of all layers together that `budget` bytes hold, at least `floor` per layer; `last` as in
    `layout`."""
    least = layout([floor] * shape.layers, 0, prompt_tokens, max_new, page, last).bytes(shape)
    token = shape.kv_heads * (shape.head_token_bytes + SLOT_TABLE_BYTES)
    return min(shape.layers * floor + (budget - least) // token, shape.layers * (prompt_tokens + last))
