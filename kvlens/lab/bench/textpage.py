"""Free text in words: the tables of `kvlens bench text` for the docs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kvlens import methods
from kvlens.lab.bench.joined import variants_measured, with_variants
from kvlens.lab.results.formats import NARROW, TITLES, UNKNOWN, narrow_cell
from kvlens.lab.results.names import measured_on, name_methods, table_name
from kvlens.runs.memory import attended_share

MEANT = """
No question is asked: behind a context of real text its own next words are fed, whatever a method would have said, and
each next-token distribution is compared with full KV's. *KL*: nats per token, mean over tokens and passages, with
Student's 95 % interval over passages. Each begins at a sentence of its own, drawn from one text as long as 32 of them:
of thirty, 21 share part of their context with another, none a token that is fed. The losses of two that share some are
a little alike (correlation 0.2, mean over methods at 20 %), so that intervals of thirty passages are about an eighth
too narrow. *Agreement*: share of tokens at which both find the same token most likely. *Nats*: what the text's own
token costs, in brackets under full KV. The other columns are those above.
"""
COLUMNS = (
    "method",
    "budget",
    "preset",
    "KL (95 %), nats per token",
    "top-1 agreement",
    "nats per token (full KV)",
    "coverage",
    "selection recall",
    "attended",
    *TITLES,
    "read",
    "passages",
)


def sections(results: Sequence[dict[str, Any]]) -> str:
    """Sections of the docs, what the columns mean in the first alone; of those of one model and length each is named by
    its budgets, and by its methods if these begin otherwise."""
    requested = [result["about"]["request"] for result in results]
    places = Counter(map(_place, requested))
    lists = Counter((model, length) for model, length, _ in {(*_place(each), name_methods(each)) for each in requested})
    text = ""
    for result, request in zip(results, requested, strict=True):
        title = f"{request['model']}, free text, {request['length']:,} tokens of context"
        if places[_place(request)] > 1:
            title += f": at {', '.join(request['budgets'])}"
        if lists[_place(request)] > 1:
            title += f", {name_methods(request)}"
        text += f"\n## {title}\n{'' if text else MEANT}\n{markdown(result)}"
    return text


def _place(request: dict[str, Any]) -> tuple[str, int]:
    return request["model"], request["length"]


def markdown(result: dict[str, Any]) -> str:
    """The table for the docs: a row per method and budget, the noise floor first."""
    about, request = result["about"], result["about"]["request"]
    text = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    presets = about.get("presets", {})
    for line in with_variants(result):
        preset = line.get("requested_preset", presets.get(line["method"]))
        text.append(f"| {' | '.join(_cells(line, request, preset))} |")
    text += [
        "",
        f"{about['trials']:,} of {about['planned']:,} trials, model {request['model']}, {request['tokens']} tokens fed "
        f"behind {request['length']:,} of context, float32 but where said; {about['text']}. {_together(request)}"
        f"{measured_on(about)}, {about['machine']['processor']}, "
        f"{about['machine']['cores']} cores, torch {about['torch']}, transformers {about['transformers']}."
        + variants_measured(result)
        + (f" Amended {about['amended']}." if "amended" in about else ""),
    ]
    return "\n".join(text) + "\n"


def _together(request: dict[str, Any]) -> str:
    """Return a sentence where trials shared their steps; '' where each ran alone."""
    size = request.get("batch", 1)
    return f"Up to {size} trials of a passage shared their decode steps. " if size > 1 else ""


def _cells(line: dict[str, Any], request: dict[str, Any], preset: str | None) -> list[str]:
    """preset: that was asked for."""
    title = table_name(line["method"], line["presets"], None if "variant" in line else preset)
    name = title if line["dtype"] == "float32" else f"{title} in {line['dtype']} (noise floor)"
    keeps_all = methods.get(line["method"]).keeps_all
    is_share = attended_share(line["method"], line["budget"] or None, {}) is not None
    held = f"{line['budget']} of attended tokens" if is_share else "none" if keeps_all else line["budget"]
    cells = [name, held if line["budget"] else "none", ", ".join(line["presets"])]
    if not line["n"]:
        short = line["smallest_feasible"]
        why = f"infeasible, needs {short:.0%}" if short is not None else "refused" if line.get("refused") else "not run"
        return [*cells, why, *[""] * (len(COLUMNS) - 5), "0"]
    within = f" ({line['kl_low']:.4f}-{line['kl_high']:.4f})" if line["kl_low"] is not None else ""
    return [
        *cells,
        f"{line['kl']:.4f}{within}",
        f"{line['agreement']:.3f}",
        f"{line['nats']:.3f} ({line['full_nats']:.3f})",
        f"{line['coverage']:.2f}",
        f"{line['selection_recall']:.2f}",
        f"{line['attended_share']:.1%}",
        *_resident(line, request, preset),
        f"{line['read_share']:.1%}",
        str(line["n"]),
    ]


def _resident(line: dict[str, Any], request: dict[str, Any], preset: str | None) -> tuple[str, str]:
    """The peak as a share of full KV in float32 and in 16 bits. A control's is known for its own format alone."""
    share = f"{line['resident_share']:.1%}"
    if line["dtype"] == NARROW:
        return UNKNOWN, share
    return share, narrow_cell(request["model"], request["length"], line["method"], line["budget"], preset)
