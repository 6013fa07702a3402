"""Relative errors of restored keys and values, by span: the norm of the difference, divided by the norm of the exact
states. Shapes: h KV heads, m tokens, D head size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from kvlens.kernels.group_sums import sum_by_group
from kvlens.rows import SpanHeadRow


def range_errors(restored: torch.Tensor, exact: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return the errors float32 [h, spans] of spans that are ranges [start, end) of the tokens. restored, exact
    [h, m, D]."""
    restored, exact, parts = restored.float(), exact.float(), []
    for part in (restored - exact, exact):
        sums = F.pad(part.square().sum(-1).cumsum(-1), (1, 0))
        parts.append(sums[:, [end for _, end in ranges]] - sums[:, [start for start, _ in ranges]])
    return (parts[0] / parts[1].clamp(min=1e-20)).clamp(min=0).sqrt()


def owner_errors(
    restored: torch.Tensor, exact: torch.Tensor, owner: torch.Tensor, live: torch.Tensor, spans: int
) -> list[list[float]]:
    """Return the errors [h][spans] of spans that own tokens anywhere. restored, exact [h, m, D]; owner int64 [h, m];
    live float64 [h, m]: 0 where there is no token."""
    restored, exact, sums = restored.double(), exact.double(), []
    for part in (restored - exact, exact):
        sums.append(sum_by_group(part.square().sum(-1) * live, owner, spans))
    errors: list[list[float]] = (sums[0] / sums[1].clamp(min=1e-20)).sqrt().tolist()
    return errors


def error_row(span: int, layer: int, kv_head: int, key: float, value: float | None) -> SpanHeadRow:
    """Return the row of a quantised span. value None: its values are not packed yet."""
    return SpanHeadRow(span, layer, kv_head, "quantised", None, None, 0, key, value)


def error_rows(spans: Sequence[int], keys: torch.Tensor, values: torch.Tensor | None) -> list[SpanHeadRow]:
    """Return a row of each span, layer and KV head: errors of keys and values [L, H_kv, spans]; the values of the last
    spans may be missing."""

    def rows() -> Iterator[SpanHeadRow]:
        of_keys, of_values = keys.tolist(), None if values is None else values.tolist()
        recorded = 0 if values is None else values.shape[-1]
        for number, span in enumerate(spans):
            for layer, head in np.ndindex(*keys.shape[:2]):
                value = of_values[layer][head][number] if of_values and number < recorded else None
                yield error_row(span, layer, head, of_keys[layer][head][number], value)

    return list(rows())
