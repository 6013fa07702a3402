"""Whole tokens by shares: of layers, of KV heads, of segments. No torch."""

from __future__ import annotations

from collections.abc import Sequence


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


def round_shares(shares: Sequence[float], total: int) -> list[int]:
    """Whole numbers nearest to `shares`, which add up to `total` but for rounding: all rounded down, and one more for
    those of the largest fractions, the first among equals."""
    counts = [int(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda index: counts[index] - shares[index])
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return counts
