"""Shared by the tests of the trace store: random records, and what an error message must be."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvlens.app.data.keeping import KeepingSession
from kvlens.decisions import DECISION_KINDS, DECISION_UNITS, NONE, Decisions
from kvlens.instruments import Effects, Loss, Oracle, Scores, SpanKeys
from kvlens.meta import RunMeta
from kvlens.records import PrefillRecord, SelfCheck, StepRecord
from kvlens.rows import (
    EVENT_KINDS,
    HEAD_COLUMNS,
    KV_COLUMNS,
    EventRow,
    JournalRow,
    PromptToken,
    SpanHeadRow,
    SpanRow,
    TransferRow,
)
from kvlens.store.reader import TraceReader
from kvlens.store.writer import TraceWriter


class KeepingReader(TraceReader):
    """Asks a trace once for what it is asked again, of hundreds of spans one after the other."""

    session = KeepingSession


COUNTS = {"n_zoomed", "corrected", "zoom_asked", "zoom_refused"}
COSINES = {"similarity", "qcos"}
SPANS = 40
"""ids of the spans of every run that is written here are below it"""


def make_step(
    rng: np.random.Generator, step: int, sizes: tuple[int, int, int, int], text: str = "x", skip: Collection[str] = ()
) -> StepRecord:
    """A record of random values in which single values and the columns of `skip` are not recorded."""
    layers, q_heads, kv_heads, top_k = sizes
    head, kv = {}, {}
    for name in HEAD_COLUMNS:
        if name in skip:
            continue
        top = 2 if name == "corrected" else 60_000
        least = -1 if name in COSINES else 0
        value = rng.integers(0, top, (layers, q_heads)) if name in COUNTS else rng.uniform(least, 1, (layers, q_heads))
        head[name] = np.where(rng.random((layers, q_heads)) < 0.2, np.nan, value).astype(np.float32)
    for name in KV_COLUMNS:
        if name not in skip:
            top = 2**40 if name.endswith("_bytes") else 2**31
            value = (
                rng.uniform(-1, 1, (layers, kv_heads))
                if name in COSINES
                else rng.integers(0, top, (layers, kv_heads)).astype(float)
            )
            kv[name] = np.where(rng.random(value.shape) < 0.2, np.nan, value)
    masses = rng.dirichlet(np.ones(top_k + 1), (layers, q_heads)).astype(np.float32)
    spans = np.argsort(rng.random((layers, q_heads, SPANS)), -1)[..., :top_k].astype(np.int32)
    spans[rng.random(spans.shape) < 0.3] = -1
    transfers = [
        TransferRow(
            step,
            i % layers,
            None if i % 2 else i % kv_heads,
            None if i % 3 else i,
            "h2d" if i % 2 else "d2h",
            "zoom",
            10**i,
            5,
            9,
            1,
            bool(i % 2),
        )
        for i in range(int(rng.integers(0, 4)))
    ]
    events = [
        EventRow(
            step,
            None if i % 2 else 0,
            None,
            None if i % 3 else 0,
            EVENT_KINDS[i],
            i if i % 2 else None,
            float(i) if i % 2 else None,
        )
        for i in range(int(rng.integers(0, len(EVENT_KINDS))))
    ]
    return StepRecord(
        step=step,
        t_us=step * 1000,
        dur_us=900,
        wait_us=3,
        record_us=2,
        token_id=7 + step,
        text=text,
        logprob=float(rng.normal()),
        next_entropy=float("nan"),
        resident_bytes=100 + step,
        peak_bytes=200 + step,
        cold_bytes=300,
        head=head,
        kv=kv,
        top_span=spans,
        top_mass=masses[..., :-1],
        tail_mass=masses[..., -1],
        transfers=transfers,
        events=events,
        journal=make_journal(rng, step, layers, kv_heads),
        scores=make_scores(rng, layers, kv_heads) if rng.random() < 0.7 else None,
        loss=make_loss(rng, text) if rng.random() < 0.7 else None,
        oracle=agreeing(make_oracle(rng, layers, q_heads), spans, masses) if rng.random() < 0.7 else None,
        decisions=make_decisions(rng, layers, kv_heads) if rng.random() < 0.7 else None,
    )


def make_decisions(rng: np.random.Generator, layers: int, kv_heads: int) -> Decisions:
    """Decisions of all kinds, some of them for all layers and without a figure."""
    n = int(rng.integers(1, 5))
    granted, refused, missed = (rng.integers(0, 4, n).astype(np.int32) for _ in range(3))
    return Decisions(
        rng.integers(NONE, layers, n).astype(np.int32),
        rng.integers(NONE, kv_heads, n).astype(np.int32),
        np.full(n, NONE, np.int32),
        rng.integers(0, len(DECISION_KINDS), n).astype(np.uint8),
        rng.integers(0, len(DECISION_UNITS), n).astype(np.uint8),
        rng.integers(NONE, 99, n).astype(np.int32),
        granted + refused + missed,
        granted,
        refused,
        missed,
        np.where(rng.random(n) < 0.3, np.nan, rng.normal(0, 1, n)).astype(np.float32),
        rng.normal(0, 1, n).astype(np.float32),
        rng.integers(0, SPANS, refused.sum()).astype(np.int32),
        rng.integers(0, SPANS, missed.sum()).astype(np.int32),
    )


def make_journal(rng: np.random.Generator, step: int, layers: int, kv_heads: int) -> list[JournalRow]:
    """Vectors of any length, some numbers of which are not recorded."""
    rows = []
    for i in range(int(rng.integers(0, 4))):
        values = rng.normal(0, 10.0 ** rng.integers(-6, 6), int(rng.integers(0, 5)))
        values[rng.random(values.shape) < 0.3] = np.nan
        layer = None if i == 1 else i % layers
        rows.append(JournalRow(step, layer, None if i < 2 else i % kv_heads, f"name {i}", values.astype(np.float32)))
    return rows


def make_scores(rng: np.random.Generator, layers: int, kv_heads: int) -> Scores:
    """Rankings with gaps; how many spans are listed differs from step to step."""
    shape = (layers, kv_heads, int(rng.integers(0, 6)))
    spans = rng.integers(-1, SPANS, shape).astype(np.int32)
    score = np.where(rng.random(shape) < 0.2, np.nan, rng.normal(0, 1e-4, shape)).astype(np.float32)
    return Scores(spans, score, rng.random(shape) < 0.5, rng.integers(0, 99, (layers, kv_heads)).astype(np.int32))


def make_loss(rng: np.random.Generator, text: str) -> Loss:
    numbers = [float(x) for x in rng.normal(0, 3, 4)]
    numbers[int(rng.integers(0, 4))] = float("nan")
    return Loss(
        int(rng.integers(0, 99)),
        text,
        int(rng.integers(0, 99)),
        text[::-1],
        bool(rng.random() < 0.5),
        *numbers,
        int(rng.integers(0, 2**31)),
    )


def make_oracle(rng: np.random.Generator, layers: int, q_heads: int) -> Oracle:
    """Some layers of which were not sampled; how many spans are listed differs from step to step."""
    width = int(rng.integers(0, 6))
    full, mass = (rng.dirichlet(np.ones(width + 1), (layers, q_heads)).astype(np.float32) for _ in range(2))
    spans = np.argsort(rng.random((layers, q_heads, SPANS)), -1)[..., :width].astype(np.int32)
    spans[rng.random(spans.shape) < 0.3] = -1
    tail, away = full[..., -1].copy(), rng.random(layers) < 0.3
    spans[away], tail[away] = -1, np.nan
    return Oracle(spans, full[..., :-1].copy(), mass[..., :-1].copy(), tail)


def agreeing(oracle: Oracle, spans: np.ndarray, masses: np.ndarray) -> Oracle:
    """The oracle with a head's own masses on the spans that are among its top spans too: both are one figure, and a
    trace reads it where it has more digits."""
    same = (oracle.span[..., None] == spans[..., None, :]) & (spans[..., None, :] >= 0)
    own = (same * masses[..., None, : spans.shape[-1]]).sum(-1)
    return replace(oracle, mass=np.where(same.any(-1), own, oracle.mass).astype(np.float32))


def make_span_keys(rng: np.random.Generator, layers: int, kv_heads: int) -> SpanKeys:
    return SpanKeys(
        "pre-rope", np.array([0, 7, 3], np.int32), rng.normal(0, 2, (layers, kv_heads, 3, 4)).astype(np.float32)
    )


def stored(values: np.ndarray) -> np.ndarray:
    """float32 values as the trace keeps them."""
    return np.round(values.astype(np.float64), 4).astype(np.float32)


def make_prefill(tokens: int = 3, layers: int = 2) -> PrefillRecord:
    prompt = [
        PromptToken(i, i + 5, f"t{i}", i if i else None, i + 1, None if i == 0 else 0.5 * i) for i in range(tokens)
    ]
    spans = [SpanRow(0, "sink", 0, 1, -1, "first"), SpanRow(1, "entropy", 1, tokens, -1, "rest", 1.25, "coarse")]
    spans += [SpanRow(span, "page", 0, 0, -1, "empty") for span in range(2, SPANS)]
    forms = [
        SpanHeadRow(1, 0, 0, "factors", 2, 3, 640, 0.1, float("nan")),
        SpanHeadRow(1, 1, 0, "raw", None, None, 99, None, None),
    ][:layers]
    return PrefillRecord(
        tokens=prompt,
        spans=spans,
        span_heads=forms,
        transfers=[TransferRow(-1, 0, None, 1, "d2h", "offload", 739, 1, 2, 1, True)],
        events=[],
        prefill_us=10,
        prefill_peak_bytes=20,
        cold_bytes=30,
        resident_bytes=40,
        journal=[JournalRow(-1, 0, None, "head_share", np.array([0.25, np.nan], np.float32))],
    )


def make_effects(step: int, *triples: tuple[int, int, int], effect: Sequence[float] = (), lead: float = 2.5) -> Effects:
    """Effects of (layer, KV head, span) at a step; without `effect` each half of the one before it."""
    ids = np.array(triples, np.int32).reshape(-1, 3).T
    return Effects(step, lead, *ids, np.array(effect or 0.5 ** np.arange(len(triples)), np.float32))


def write(
    folder: Path,
    records: list[StepRecord],
    sizes: tuple[int, int, int, int],
    effects: Sequence[Effects] = (),
    **options: Any,
) -> TraceReader:
    writer = TraceWriter(folder, **options)
    layers, q_heads, kv_heads, _ = sizes
    writer.begin(RunMeta(layers=layers, q_heads=q_heads, kv_heads=kv_heads, model="m", method="full", config={"a": 1}))
    writer.prefill(
        replace(make_prefill(layers=layers), span_keys=make_span_keys(np.random.default_rng(5), layers, kv_heads))
    )
    for record in records:
        writer.step(record)
    writer.effects(effects)
    writer.finish("completed", None, [SelfCheck("given", True, 0.5, "why")], {"answer": "42"})
    return TraceReader.open(folder, writer.uid)


def one_sentence(error: BaseException) -> None:
    text = str(error)
    assert "\n" not in text
    assert text.endswith(".")
    assert len(text) < 600
