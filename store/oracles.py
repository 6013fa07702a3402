"""Full attention per span and mean keys of spans, on their way to disk."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from kvlens.instruments import Oracle, SpanKeys
from kvlens.store.errors import TraceError
from kvlens.store.rowtables import check_shape
from kvlens.store.schema import MAX_SPAN, ORACLE_CODES


def copied_oracle(step: int, oracle: Oracle, heads: tuple[int, int]) -> Oracle:
    """A copy, since what logs it may reuse its arrays. `heads`: (layers, query heads). TraceError for other
    shapes, and for masses that are not recorded where a span is listed."""
    listed = (*heads, oracle.span.shape[-1] if oracle.span.ndim else 0)
    for name, want in (("span", listed), ("full", listed), ("mass", listed), ("tail_full", heads)):
        check_shape(step, f"oracle.{name}", getattr(oracle, name), want)
    span = oracle.span.astype(np.int32)
    full, mass, tail = (values.astype(np.float32) for values in (oracle.full, oracle.mass, oracle.tail_full))
    there = span >= 0
    if (
        not np.isfinite(full[there]).all()
        or not np.isfinite(mass[there]).all()
        or (there & np.isnan(tail)[..., None]).any()
    ):
        raise TraceError(
            f"Step {step} logs full attention on a span without its mass or tail; this is a bug in what logs it."
        )
    return Oracle(span, full, mass, tail)


def oracle_table(seen: Sequence[tuple[int, Oracle]]) -> pa.Table:
    """Rows of oracle, ordered (step, layer, query head): one for each query head of each layer that was sampled at a
    step.

    `seen`: (step, oracle); how many spans are listed may differ from step to step.
    """
    spans: list[np.ndarray] = []
    keys: dict[str, list[np.ndarray]] = {"step": [], "layer": [], "q_head": [], "tail_full": [], "count": []}
    masses: dict[str, list[np.ndarray]] = {"full_mass": [], "mass": []}
    for step, oracle in seen:
        layer, q_head = np.nonzero(np.isfinite(oracle.tail_full))
        there = oracle.span[layer, q_head] >= 0
        spans.append(oracle.span[layer, q_head][there])
        for name, values in (("full_mass", oracle.full), ("mass", oracle.mass)):
            masses[name].append(_codes(values[layer, q_head][there]))
        columns = {"step": np.full(len(layer), step), "layer": layer, "q_head": q_head, "count": there.sum(-1)}
        for name, column in (columns | {"tail_full": oracle.tail_full[layer, q_head]}).items():
            keys[name].append(column)
    whole = {name: np.concatenate([np.empty(0), *parts]) for name, parts in keys.items()}
    kept = np.concatenate([np.empty(0, np.int32), *spans])
    _check_ids(kept)
    offsets = pa.array(np.concatenate(([0], np.cumsum(whole.pop("count")))).astype(np.int32))
    lists = {"span": kept.astype(np.uint16)}
    lists |= {name: np.concatenate([np.empty(0, np.uint16), *parts]) for name, parts in masses.items()}
    return pa.table(
        {
            "step": whole["step"].astype(np.uint32),
            "layer": whole["layer"].astype(np.uint8),
            "q_head": whole["q_head"].astype(np.uint8),
            **{name: pa.ListArray.from_arrays(offsets, pa.array(values)) for name, values in lists.items()},
            "tail_full": np.round(whole["tail_full"], 6).astype(np.float32),
        }
    )


def span_key_table(found: SpanKeys, heads: tuple[int, int]) -> pa.Table:
    """Rows of span_key, ordered (layer, KV head, span). `heads`: (layers, KV heads)."""
    count, size = len(found.span), found.keys.shape[-1]
    check_shape(-1, "span_keys.keys", found.keys, (*heads, count, size))
    _check_ids(found.span)
    layers, kv_heads = heads
    rows = layers * kv_heads * count
    offsets = pa.array(size * np.arange(rows + 1, dtype=np.int64), pa.int32())
    return pa.table(
        {
            "layer": np.repeat(np.arange(layers, dtype=np.uint8), kv_heads * count),
            "kv_head": np.tile(np.repeat(np.arange(kv_heads, dtype=np.uint8), count), layers),
            "span": np.tile(found.span.astype(np.uint16), layers * kv_heads),
            "form": pa.array([found.form] * rows, pa.string()),
            "key": pa.ListArray.from_arrays(offsets, pa.array(found.keys.astype(np.float32).reshape(-1))),
        }
    )


def _check_ids(spans: np.ndarray) -> None:
    if spans.size and (spans.max() > MAX_SPAN or spans.min() < 0):
        raise TraceError(f"Span ids above {MAX_SPAN} cannot be stored; make longer spans or log fewer.")


def _codes(mass: np.ndarray) -> np.ndarray:
    return np.rint(ORACLE_CODES * np.sqrt(np.clip(mass, 0, 1))).astype(np.uint16)
