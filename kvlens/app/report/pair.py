"""The sections about two runs, A (the report's run) and B (the one it is compared with)."""

from __future__ import annotations

import numpy as np

from kvlens.app.compare.names import run_name
from kvlens.app.compare.pair import Pair, divergence_words
from kvlens.app.compare.settings import KINDS, config_difference, setting_words
from kvlens.app.compare.totals import totals as totals_of
from kvlens.app.compare.totals import totals_table
from kvlens.app.figures.compare import run_maps
from kvlens.app.figures.comparetracks import A_AND_B, Track, overlaid
from kvlens.app.report.markup import Figures, folded, missing, paragraph, table
from kvlens.recording.metrics import REGRETS, metric_of
from kvlens.store.reader import TraceReader
from kvlens.text.units import counted


def two_runs(a: TraceReader, b: TraceReader, figures: Figures) -> list[tuple[str, str]]:
    """(title, HTML) of every section, in order."""
    pair = Pair.read(a, b)
    sections = [
        ("A and B", names(pair)),
        ("What was set differently", settings(pair)),
        ("Totals of A and B", totals(pair)),
    ]
    if pair.apart is None:
        sections += [("A and B by head", maps(pair, figures)), ("A and B over the steps", tracks(pair, figures))]
    return sections


def names(pair: Pair) -> str:
    """Which runs they are, and what may be compared."""
    rows = [(name, run_name(run), run.uid) for name, run in (("A", pair.a), ("B", pair.b))]
    said = pair.apart or divergence_words(pair)
    return table(("", "run", "uid"), rows) + paragraph(said, "verdict")


def settings(pair: Pair) -> str:
    """Settings that differ; the others folded away."""
    frame = config_difference({"A": pair.a, "B": pair.b})
    frame["setting"] = frame["setting"].map(setting_words)
    parts = {kind: frame.loc[frame["kind"] == kind, ["setting", "A", "B"]].to_numpy().tolist() for kind in KINDS}
    head, alone, same = ("setting", "A", "B"), parts["some methods only"], parts["same"]
    shown = (
        table(head, parts["differs"]) if parts["differs"] else paragraph("Nothing: both runs have the same settings.")
    )
    shown += folded("Circumstances that differ", table(head, parts["circumstances"])) if parts["circumstances"] else ""
    shown += (
        folded(f"{counted(len(alone), 'parameter')} that only one of the methods has", table(head, alone))
        if alone
        else ""
    )
    return shown + folded(f"{len(same)} settings are the same", table(head, same))


def totals(pair: Pair) -> str:
    """What each came to, and B beside A in words."""
    frame = totals_table({"A": totals_of(pair.a), "B": totals_of(pair.b)}, ("A", "B"))
    return table(("quantity", "A", "B", "B beside A"), frame[["quantity", "A", "B", "B beside A"]].to_numpy().tolist())


def maps(pair: Pair, figures: Figures) -> str:
    """Coverage and regret of both, and the difference."""
    if not pair.same_shape:
        return missing("The models have different layers or heads, so their maps do not correspond.")
    parts = []
    both = min(pair.a.n_steps, pair.b.n_steps)
    until = both if pair.divergence is None else pair.divergence + 1
    shared_names = [name for name in REGRETS if name in pair.a.metrics() and name in pair.b.metrics()]
    for name in ("coverage", *(shared_names[:1] or REGRETS[:1])):
        if name not in pair.a.metrics() or name not in pair.b.metrics():
            parts.append(missing(f"{metric_of(name).title}: not recorded in both runs."))
            continue
        metric = metric_of(name)
        a, b = (reader.head_summary(name, 0, until) for reader in (pair.a, pair.b))
        peak = np.nan_to_num(np.abs(b - a), nan=-1.0)
        layer, head = np.unravel_index(int(peak.argmax()), peak.shape)
        how = f"mean over {until} step{'s' if until > 1 else ''} with the same context"
        note = (
            "A and B share one range of colours; B − A has its own, symmetric around 0. Outlined: where they "
            "differ most."
        )
        drawn = run_maps({"A": a, "B": b}, b - a, pair.a.kv_heads, metric, (int(layer), int(head)), how)
        parts.append(figures.place(drawn, f"{metric.title} of A and B", note))
    return "".join(parts)


def tracks(pair: Pair, figures: Figures) -> str:
    """Bytes and the probability of what was chosen, of both runs."""
    found = []
    for column, title in (
        ("h2d_bytes", "Moved to the device"),
        ("peak_bytes", "KV on the device, peak inside the step"),
    ):
        found.append(
            Track(title, "bytes", tuple(reader.steps()[column].to_numpy(np.float64) for reader in (pair.a, pair.b)))
        )
    found.append(Track("log p of the step's token", "nats", (_logprob(pair.a), _logprob(pair.b))))
    figure = overlaid(found, A_AND_B, 0 if pair.divergence is None else pair.divergence, pair.divergence)
    return figures.place(
        figure, "Quantities of A and B over decode steps", "The line marks the first divergence, else step 0."
    )


def _logprob(reader: TraceReader) -> np.ndarray:
    tokens = reader.tokens()
    return tokens.loc[tokens["step"].notna()].sort_values("step")["logprob"].to_numpy(np.float64)
