"""What a run says of a model's sliding windows."""

from __future__ import annotations

from collections.abc import Sequence


def window_sentence(windows: Sequence[int]) -> str:
    """Return one sentence on layers that attend their newest tokens only. windows: per layer the tokens of its window,
    0 where it has none; some layer has one."""
    layers = [window for window in windows if window]
    sizes = " or ".join(f"{size:,}" for size in sorted(set(layers)))
    if len(layers) == len(windows):
        return f"Every layer attends its newest {sizes} tokens only. Older tokens count as no loss."
    rest = len(windows) - len(layers)
    return (
        f"{len(layers)} of {len(windows)} layers attend and keep their newest {sizes} tokens. "
        f"The method acts on the other {rest}."
    )
