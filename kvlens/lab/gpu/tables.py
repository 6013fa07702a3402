"""What one device's result file holds, as tables of Markdown: one per kind of row."""

from __future__ import annotations

from collections.abc import Sequence

from kvlens import methods
from kvlens.lab.gpu.rates import WORDS, words
from kvlens.lab.gpu.settings import title
from kvlens.lab.results.gpu import (
    CeilingRow,
    CheckRow,
    HeadlineRow,
    KernelRow,
    LedgerRow,
    RecordingRow,
    Result,
    StepRow,
)
from kvlens.lab.results.offloadrow import OffloadRow
from kvlens.methods.naming import preset_name
from kvlens.runs.request import default_preset

OUTCOMES = {True: "passed", False: "**FAILED**", None: "not compared"}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + " --- |" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.2f}"


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def device(result: Result) -> str:
    """Everything one device's file holds, a table per kind of row."""
    about = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    lines = [
        f"### {result.device['name']}",
        "",
        f"Driver {result.device['driver']}; {about}; {result.updated}. Clocks as found: "
        f"{result.device['clocks']}. {result.note}",
        "",
    ]
    if result.missing:
        lines += [f"Not measured yet: {', '.join(result.missing)}.", ""]
    for entry in result.entries.values():
        if entry.status != "done":
            lines += [f"{entry.part}: {entry.status}. {entry.reason or ''}", ""]
        if not entry.rows:
            continue
        lines += [f"**{entry.part}** ({entry.date})", ""]
        start, rows = entry.rows[0], entry.rows
        match start:
            case CeilingRow():
                cells = [
                    [r.name, r.setting, f"{1e6 * r.seconds:.1f}", f"{r.rate / 1e9:.1f} G{r.unit}"]
                    for r in rows
                    if isinstance(r, CeilingRow)
                ]
                lines += table(("ceiling", "setting", "us", "rate"), cells)
            case CheckRow():
                cells = [
                    [r.name, f"{r.error:.2g}", f"{r.tolerance:g}", OUTCOMES[r.passed]]
                    for r in rows
                    if isinstance(r, CheckRow)
                ]
                lines += table(("check", "error", "tolerance", ""), cells)
            case KernelRow():
                lines += table(KERNEL_HEAD, [_kernel(r) for r in rows if isinstance(r, KernelRow)])
            case StepRow():
                lines += table(STEP_HEAD, [_step(r) for r in rows if isinstance(r, StepRow)])
            case HeadlineRow():
                lines += table(HEADLINE_HEAD, [headline(r) for r in rows if isinstance(r, HeadlineRow)])
            case RecordingRow():
                cells = [
                    [title(r.method), r.recording, "yes" if r.graph else "no", ms(r.median), ms(r.p95), share(r.added)]
                    for r in rows
                    if isinstance(r, RecordingRow)
                ]
                lines += table(("method", "recorded", "graph", "median, ms", "p95, ms", "added"), cells)
            case LedgerRow():
                cells = [
                    [r.name, str(r.counted), str(r.seen), str(r.events), r.how, "equal" if r.passed else "**DIFFER**"]
                    for r in rows
                    if isinstance(r, LedgerRow)
                ]
                lines += table(("bytes of", "counted", "seen", "events", "how", ""), cells)
            case OffloadRow():
                lines += table(OFFLOAD_HEAD, [_offload(r) for r in rows if isinstance(r, OffloadRow)])
        lines.append("")
    return "\n".join(lines)


KERNEL_HEAD = ("kernel", "setting", "us", "GB/s", "ceiling", "share of it", "aim")


def _kernel(row: KernelRow) -> list[str]:
    if row.seconds is None or row.rate is None:
        return [row.kernel, row.setting, row.reason or "", "", row.ceiling, "", share(row.aim)]
    return [
        row.kernel,
        row.setting,
        f"{1e6 * row.seconds:.1f}",
        f"{row.rate / 1e9:.0f}",
        row.ceiling,
        share(row.share),
        share(row.aim),
    ]


STEP_HEAD = (
    "method",
    "tokens x sequences",
    "layers",
    "attended by",
    "steps",
    "median, ms",
    "p95, ms",
    "in the loop (mean), ms",
    "floor, ms",
    "achieved / floor",
    "stall, ms",
    "host GB per step (counted)",
    "peak GB",
    "rates, notes",
)


def _step(row: StepRow) -> list[str]:
    over = "" if row.over_floor is None else f"{row.over_floor:.2f}"
    peak = "" if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.1f}"
    way = ", compiled whole" if row.scope == "compiled" else ""
    how = "" if row.median is None else ("a CUDA graph" if row.graph else "no graph") + way
    sentence = "; ".join(part for part in (how, words(row.rates, row.rates_from), row.note, row.reason or "") if part)
    host = "" if row.host_bytes is None else f"{row.host_bytes / 1e9:.3f}"
    host += "" if row.counted_bytes is None else f" ({row.counted_bytes / 1e9:.3f})"
    return [
        title(row.method),
        f"{row.context} x {row.batch}",
        row.way,
        "k1" if row.kernels == "triton" else "SDPA",
        str(row.steps or ""),
        ms(row.median),
        ms(row.p95),
        ms(row.loop),
        ms(row.floor),
        over,
        ms(row.stall),
        host,
        peak,
        sentence,
    ]


OFFLOAD_HEAD = (
    "method",
    "model, prompt, budget",
    "tokens/s (recorded)",
    "to the device per step, MB",
    "to host memory, MB",
    "waited per step, ms",
    "copies per step, ms",
    "beside the model, at least",
    "peak on the device, MB",
    "self-checks",
    "trace",
)


def offload_name(row: OffloadRow) -> str:
    """Return what the method of a run with offload is called, its stand-ins included; its name if it is not installed
    here."""
    installed = row.method in methods.registry()
    return preset_name(row.method, default_preset(row.method, row.model)) if installed else row.method


def _offload(row: OffloadRow) -> list[str]:
    name = offload_name(row)
    label = f"{row.model} in {row.dtype}, {row.context} tokens, {row.budget}"
    if row.tokens_per_s is None:
        return [name, label, row.reason or "", *[""] * (len(OFFLOAD_HEAD) - 3)]
    return [
        name,
        label,
        f"{row.tokens_per_s:.1f} ({row.recorded_tokens_per_s or 0:.1f})",
        f"{(row.h2d_bytes or 0) / row.steps / 1e6:.2f}",
        f"{(row.d2h_bytes or 0) / 1e6:.2f}",
        ms((row.waited or 0) / row.steps),
        ms((row.moving or 0) / row.steps),
        share(row.overlapped),
        f"{(row.peak_bytes or 0) / 1e6:.1f}",
        f"**FAILED**: {', '.join(row.wrong)}" if row.wrong else f"{row.checks} passed",
        row.trace or "",
    ]


HEADLINE_HEAD = (
    "headline",
    "rates",
    "paper",
    "ours",
    "floor's",
    "measured at (ours, floor)",
    "within reach of bytes alone",
)


def headline(row: HeadlineRow) -> list[str]:
    show = share if row.quantity == "memory saved" else lambda value: "" if value is None else f"{value:.2f}"
    ours, reachable = show(row.ours) or "not measured", "yes" if row.reachable else "no"
    return [row.name, WORDS[row.rates_from], show(row.paper), ours, show(row.floor), row.where, reachable]
