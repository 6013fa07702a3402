"""Arithmetic of prompt eviction, without torch: how many tokens bytes can hold, and the layout that holds them.

`tokens[layer][head]`: prompt tokens a KV head keeps; a layer with one entry keeps as many for all its KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvlens.memory.layout import SLOT_TABLE_BYTES, Layout, Zones
from kvlens.shape import KVShape

Tokens = Sequence[Sequence[int]]


def alike(count: int, layers: int) -> Tokens:
    """The same number for every KV head of every layer."""
    return [[count]] * layers


def divided(total: int, layers: int) -> Tokens:
    """`total` tokens of all layers in equal parts, what is left over one by one to the first layers."""
    return [[total // layers + (layer < total % layers)] for layer in range(layers)]


def allocate(shares: Sequence[float], total: int, floor: int, most: int) -> list[int]:
    """Prompt tokens of each layer: `floor` each, the rest in proportion to `shares`, no layer
    above `most`; what rounding and clipping leave over is given, token by token, to the layers of largest share first,
    or taken from those of smallest share.

    shares >= 0, one per layer, of any scale; all zero count as equal. Adds up to `total`, which must lie between
    len(shares) * floor and len(shares) * most.
    """
    layers = len(shares)
    assert layers * floor <= total <= layers * most, (layers, floor, total, most)
    scale = sum(shares)
    part = [layer_share / scale for layer_share in shares] if scale > 0 else [1 / layers] * layers
    spare = total - layers * floor
    tokens = [min(floor + round(layer_part * spare), most) for layer_part in part]
    order = sorted(range(layers), key=lambda layer: -shares[layer])
    while (difference := total - sum(tokens)) != 0:
        if difference > 0:
            able = [layer for layer in order if tokens[layer] < most]
        else:
            able = [layer for layer in order[::-1] if tokens[layer] > floor]
        for layer in able[: abs(difference)]:
            tokens[layer] += 1 if difference > 0 else -1
    return tokens


def rounded(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers nearest to `shares`, which add up to `total` but for rounding: all rounded down, and one more for
    those of the largest fractions, the first among equals."""
    counts = [int(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda index: counts[index] - shares[index])
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return counts


def layout(
    tokens: Tokens, window: int, prompt_tokens: int, max_new: int, page: int, last: int, apart: bool = False
) -> Layout:
    """Layout of KV heads that keep `tokens` of the prompt, the last `window` of them in the window zone with everything
    decoded.

    prompt_tokens: those that prefill covered. last: 1 when the token after them, which step 0 feeds, is counted in
    `tokens` and `window`, else 0; its slot is in either case the first of the `max_new`. When every KV head keeps the
    whole prompt the layout is FullKV's, all that prefill covered in the kept zone, unless the window stays apart.
    """
    whole = prompt_tokens + last
    is_whole = min(map(min, tokens)) >= whole and not apart
    inside = 0 if is_whole else max(min(window, whole) - last, 0)
    zones = [tuple(Zones(count - last - inside, 0, 0, inside + max_new) for count in layer) for layer in tokens]
    return Layout(
        tuple(heads if len(set(heads)) > 1 else heads[0] for heads in zones),
        -(-prompt_tokens // page) + 1,
        window_from=prompt_tokens - inside,
    )


def affordable(budget: int, shape: KVShape, floor: int, prompt_tokens: int, max_new: int, page: int, last: int) -> int:
    """Prompt tokens of all layers together that `budget` bytes hold when all KV heads of a layer keep as many, at least
    `floor` per layer; `last` as in `layout`."""
    least = layout(alike(floor, shape.layers), 0, prompt_tokens, max_new, page, last).bytes(shape)
    token = shape.kv_heads * (shape.head_token_bytes + SLOT_TABLE_BYTES)
    return min(shape.layers * floor + (budget - least) // token, shape.layers * (prompt_tokens + last))


def index_bytes(shape: KVShape, places: int, chunk: int) -> int:
    """Device bytes of an index (kept_index.py) over `places` tokens of every KV head in chunks of `chunk`: positions
    int32, and two extremes per chunk, or one where it is one token."""
    numbers = -(-places // chunk) * shape.head_dim * (1 + (chunk > 1))
    return shape.layers * shape.kv_heads * (places * 4 + numbers * shape.itemsize)
