"""The sections about one run that hold figures."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from kvlens.app.figures import memory, transfers
from kvlens.app.figures.heads import head_map
from kvlens.app.figures.loss import span_bars
from kvlens.app.figures.losstrack import loss_track
from kvlens.app.report.markup import Figures, missing, paragraph, table
from kvlens.app.report.spans import listed, shortened
from kvlens.lens.attribution import attribute, with_reasons
from kvlens.lens.lines import MASSES, inside
from kvlens.lens.verdict import Verdict
from kvlens.recording.metrics import head_label, metric_of
from kvlens.store.cells import integer, number, records, row_of_largest
from kvlens.store.reader import TraceReader
from kvlens.text.passages import passage
from kvlens.text.units import si_bytes
from kvlens.text.words import COPIES_NOT_RECORDED

#: How many missed (layer, KV head, span) are named.
MOST_TRIPLES = 8


def loss_over_steps(reader: TraceReader, figures: Figures, found: Verdict | None) -> str:
    """KL and log p over the steps, with a line at the step of loss, or where KL is largest."""
    loss = reader.loss()
    if loss.empty:
        return missing("Loss over the steps: not recorded.")
    worst = row_of_largest(loss, "kl")
    if found is not None:
        step, why = found.step, "the step of loss"
    elif worst is not None:
        step, why = int(worst["step"]), "where KL is largest"
    else:
        step, why = int(loss["step"].iloc[0]), "the first; no KL was recorded"
    note = (
        f"{len(loss)} of {reader.n_steps} steps have the reference's context and were compared. The line "
        f"marks step {step}, {why}."
    )
    return figures.place(loss_track(loss, reader.n_steps, step), "KL and log probability over decode steps", note)


def head_maps(reader: TraceReader, figures: Figures, found: Verdict | None) -> str:
    """Coverage and regret by layer and query head, mean over all steps; the head that missed most is outlined."""
    missed = None if found is None else found.missed
    selected = None if missed is None else (missed.layer, missed.q_head)
    outlined = "" if found is None or missed is None else f" Outlined: the head that missed most at step {found.step}."
    parts = []
    for name in ("coverage", "reference_regret", "regret"):
        if name not in reader.metrics():
            parts.append(missing(f"{metric_of(name).title} by head: not recorded."))
            continue
        metric = metric_of(name)
        figure = head_map(reader.head_summary(name), reader.kv_heads, metric, selected, "mean over all steps")
        parts.append(
            figures.place(figure, f"{metric.title} by layer and query head", f"{metric.title}: {metric.doc}.{outlined}")
        )
    return "".join(parts)


def spans_at(reader: TraceReader, figures: Figures, found: Verdict | None) -> str:
    """What full KV would have read beside what was read, at the step of loss, by the query head that missed most."""
    if found is None or found.missed is None:
        return missing(
            "Spans at the step of loss: no step was lost, or full attention's masses were not recorded there."
        )
    missed = found.missed
    label = head_label(missed.layer, missed.q_head, reader.q_heads // reader.kv_heads)
    frame = listed(reader, found.step, missed.layer, missed.q_head)
    note = (
        f"{MASSES} This run's mass and regret count a span's summary, coverage does not. ★ marks the needle, the frame "
        "the span missed most."
    )
    drawn = figures.place(
        span_bars(frame, label, found.step, missed.span), f"Masses per span of {label} at step {found.step}", note
    )
    return drawn + missed_triples(reader, found.step)


def missed_triples(reader: TraceReader, step: int) -> str:
    """The (layer, KV head, span) missed most at the step of loss, and why each was not attended exactly; below them the
    tokens lost inside spans that regret hides. With the effect on the choice where it was recorded."""
    triples = with_reasons(reader, attribute(reader), step, MOST_TRIPLES)
    tokens, spans = reader.tokens(), {row.span: row for row in reader.span_rows()}
    rows = []
    for row in records(triples):
        span = spans[integer(row["span"])]
        whole = "the window" if span.kind == "window" else passage(tokens, span.tok_start, span.tok_end)
        logits = number(row["effect"])
        effect = "" if math.isnan(logits) else f"{logits:.2f}"
        where = f"L{row['layer']} KV{row['kv_head']}, span {span.span}"
        rows.append((where, effect, f"{number(row['regret']):.4f}", shortened(whole, 90), row["why"]))
    for line in inside(reader, step)[:MOST_TRIPLES]:
        text = " … ".join(passage(tokens, start, end) for start, end in line.tokens)
        why = "not shown by the span's regret: the head gave its other tokens more than full attention does"
        effect = f"{line.effect:.2f}" if line.effect else ""
        where = f"L{line.layer} KV{line.kv_head}, {line.words()}"
        rows.append((where, effect, f"{line.share:.4f}", shortened(text, 90), why))
    heads = ("missed by, what", "effect, logits", "regret, or what it hides", "text", "why it was not attended exactly")
    if any(row[1] for row in rows):
        return table(heads, rows)
    return table((heads[0], *heads[2:]), [(row[0], *row[2:]) for row in rows])


def bytes_moved(reader: TraceReader, figures: Figures) -> str:
    """What the tiers held against the budget, and what moved by direction and cause."""
    steps, meta = reader.steps(), reader.meta
    held = memory.residency(steps, meta.budget_bytes, meta.full_kv_bytes)
    parts = [
        figures.place(
            held, "KV bytes by tier per decode step", f"Link: {meta.link or 'not recorded'}; bytes are decimal."
        )
    ]
    moved = reader.transfer_times()
    if (moved["step"] >= 0).any():
        note = "Solid: the step could not go on without it (blocking); hatched: it ran in the background."
        parts.append(
            figures.place(transfers.bytes_by_cause(moved, reader.n_steps), "Bytes moved per decode step by cause", note)
        )
    else:
        none = "Nothing moved between the tiers while decoding."
        parts.append(paragraph(COPIES_NOT_RECORDED if meta.lacks("transfer") else none, "note"))
    return "".join(parts) + by_cause(moved)


def by_cause(moved: pd.DataFrame) -> str:
    """Sums by phase, direction and cause."""
    if moved.empty:
        return ""
    phases = moved.assign(phase=np.where(moved["step"] < 0, "end of prefill", "decoding"))
    sums = (
        phases.groupby(["phase", "direction", "cause"], sort=True)[["bytes", "blocking_bytes", "n"]].sum().reset_index()
    )
    rows = [
        (
            f"{row['phase']}, {transfers.DIRECTIONS.get(row['direction'], row['direction'])}, {row['cause']}",
            si_bytes(row["bytes"]),
            si_bytes(row["blocking_bytes"]),
            f"{row['n']:,}",
        )
        for row in sums.to_dict("records")
    ]
    return table(("moved", "bytes", "of these blocking", "copies"), rows)
