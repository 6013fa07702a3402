"""What a run came to in numbers, and how two runs' numbers differ, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from kvlens.instruments import PHASES
from kvlens.store.cells import recorded_total
from kvlens.store.reader import TraceReader
from kvlens.tables.latency import latency, phase_means
from kvlens.text.units import si_bytes

#: One of what is counted.
ONE = {"tokens": "token", "steps": "step", "spans": "span", "copies": "copy"}
TO_DEVICE, TO_HOST = "to the device while decoding", "to host memory while decoding"
COMPARED, FIRST_OTHER = "steps compared with full KV", "first step that disagrees with full KV"
#: Values whose larger and smaller one differ by less than this share are called the same.
SAME = 1e-9
TIMES = ("s", "ms")
"""units of times"""


@dataclass(frozen=True)
class Total:
    """One number of a run."""

    name: str
    unit: str
    """'bytes', 'tokens', 'steps', 'step', 'spans', 'copies', 's', 'ms', 'nats', 'share'"""
    value: float
    absent: str = "not recorded"
    """what NaN means here"""
    condition: str = ""
    """what a value depends on beside the method, printed behind it"""
    batched: int | None = None
    """prompts that shared the time; such a time is compared with no other. None: it is the run's alone"""

    def text(self, value: float | None = None) -> str:
        """The value, or another of the same kind, as it is printed."""
        shown = self.value if value is None else value
        if not np.isfinite(shown):
            return self.absent
        if self.unit == "step":
            return f"step {shown:.0f}"
        if self.unit == "bytes":
            return si_bytes(shown)
        if self.unit == "share":
            return f"{shown:.4f}"
        if self.unit in (*TIMES, "nats"):
            conditions = [
                *filter(None, [self.condition]),
                *([f"{self.batched} prompts at once"] if self.batched else []),
            ]
            behind = f" ({', '.join(conditions)})" if conditions and value is None else ""
            return f"{shown:,.4g} {self.unit}{behind}"
        if shown != round(shown):
            return f"{shown:,.1f} {self.unit}"
        return f"{shown:,.0f} {ONE.get(self.unit, self.unit) if shown == 1 else self.unit}"


def totals(reader: TraceReader) -> list[Total]:
    """The run's totals, always the same ones in the same order."""
    steps, meta, moved = reader.steps(), reader.meta, reader.transfer_times()
    tokens = reader.tokens()
    logprobs = tokens.loc[tokens["step"].notna(), "logprob"]
    loss = reader.loss()
    lost = loss.loc[~loss["agrees"].astype(bool), "step"]
    decode = moved[moved["step"] >= 0]
    down = decode[decode["direction"] == "h2d"]
    times, phases, link = latency(reader), phase_means(reader), f"link {meta.link or 'not recorded'}"
    results = [
        Total("prompt", "tokens", _number(meta.prompt_tokens)),
        Total("decode steps", "steps", float(reader.n_steps)),
        Total("budget", "bytes", _number(meta.budget_bytes), "no limit"),
        Total("peak on the device, inside a step", "bytes", _most(steps["peak_bytes"])),
        Total("on the device after a step, mean", "bytes", _mean(steps["resident_bytes"])),
        Total("in host memory, most", "bytes", _most(steps["cold_bytes"])),
        Total(TO_DEVICE, "bytes", recorded_total(steps["h2d_bytes"])),
        Total("of that, blocking", "bytes", _of_copies(reader, down["blocking_bytes"])),
        Total(TO_HOST, "bytes", recorded_total(steps["d2h_bytes"])),
        Total("moved at the end of prefill", "bytes", _of_copies(reader, moved.loc[moved["step"] < 0, "bytes"])),
        Total("copies while decoding", "copies", _of_copies(reader, decode["n"])),
        Total("decoding took", "s", float(steps["dur_us"].sum()) / 1e6),
        Total("of that, waiting for copies", "s", recorded_total(steps["wait_us"]) / 1e6, condition=link),
        Total("until the first token", "s", times.first_token / 1e6),
        Total("per token after it, mean", "ms", times.per_token / 1e3),
        Total("prompt and all tokens", "s", times.end_to_end / 1e6),
        *(Total(f"phase {phase}, mean of a step", "ms", phases.get(phase, float("nan")) / 1e3) for phase in PHASES),
        Total("attended tokens per step and KV head, mean", "tokens", attended(reader)),
        Total("coverage, mean", "share", head_mean(reader, "coverage")),
        Total("regret of a query head, mean", "share", head_mean(reader, "reference_regret")),
        Total("own-query regret of a query head, mean", "share", head_mean(reader, "regret")),
        Total("log p of the step's token, mean", "nats", _mean(logprobs)),
        Total(COMPARED, "steps", float(len(loss)) if len(loss) else float("nan")),
        Total("KL from full KV, mean of these", "nats", _mean(loss["kl"])),
        Total("KL from full KV, largest", "nats", _most(loss["kl"])),
        Total(
            FIRST_OTHER,
            "step",
            float(lost.min()) if len(lost) else float("nan"),
            "none" if len(loss) else "not recorded",
        ),
    ]
    return [replace(total, batched=meta.batched) if total.unit in TIMES else total for total in results]


def attended(reader: TraceReader) -> float:
    """Tokens in the softmax per step, mean over steps, layers and KV heads; NaN when not recorded."""
    if reader.meta.trace_level == "summary" or "attended_tokens" not in reader.kv_metrics():
        return float("nan")
    return _mean(pd.Series(reader.kv_cube("attended_tokens").ravel()))


def head_mean(reader: TraceReader, metric: str) -> float:
    """A metric's mean over all steps, layers and query heads; NaN when not recorded."""
    return _mean(pd.Series(reader.head_summary(metric).ravel())) if metric in reader.metrics() else float("nan")


def totals_table(totals_by_run: Mapping[str, Sequence[Total]], pair: tuple[str, str]) -> pd.DataFrame:
    """One row per total: quantity, each run's under its name, what B of the pair (A, B) is beside A, in words; then
    the numbers themselves with their unit."""
    rows = []
    for each in zip(*totals_by_run.values(), strict=True):
        row_by_run = dict(zip(totals_by_run, each, strict=True))
        rows.append(
            {"quantity": each[0].name}
            | {name: total.text() for name, total in row_by_run.items()}
            | {"B beside A": beside(row_by_run[pair[0]], row_by_run[pair[1]]), "unit": each[0].unit}
            | {f"value {name}": total.value for name, total in row_by_run.items()}
        )
    return pd.DataFrame(rows)


def beside(a: Total, b: Total) -> str:
    """'3.1 MB more, 2.4 times A', '12 steps less', 'the same', or why nothing can be compared."""
    missing = [f"{total.absent} in {name}" for name, total in (("A", a), ("B", b)) if not np.isfinite(total.value)]
    if missing:
        return f"{a.absent} in both" if len(missing) == 2 and a.absent == b.absent else ", ".join(missing)
    batches = [
        f"{total.batched} prompts shared the steps of {name}" for name, total in (("A", a), ("B", b)) if total.batched
    ]
    if batches:
        return f"not compared: {' and '.join(batches)}"
    difference = b.value - a.value
    if abs(difference) <= SAME * max(abs(a.value), abs(b.value)):
        return "the same"
    if a.unit == "step":
        return (
            f"{abs(difference):,.0f} {'step' if abs(difference) == 1 else 'steps'} "
            f"{'later' if difference > 0 else 'earlier'}"
        )
    words = f"{a.text(abs(difference))} {'more' if difference > 0 else 'less'}"
    if b.value == 0 or a.value <= 0 or b.value < 0:
        return words
    return f"{words}, {b.value / a.value:.3g} times A"


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")


def _mean(values: pd.Series) -> float:
    return float(values.mean()) if len(values) and values.notna().any() else float("nan")


def _most(values: pd.Series) -> float:
    return float(values.max()) if len(values) else float("nan")


def _of_copies(reader: TraceReader, values: pd.Series) -> float:
    """The sum over copies; NaN if single copies were not recorded."""
    return float("nan") if reader.meta.lacks("transfer") else float(values.sum())
