"""The result of a sweep as a file: provenance, and one row per trial, column names once. Plain Python, so that pages
can read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvlens.text.plaintext import strict_json

COLUMNS = (
    "task",
    "length",
    "depth",
    "seed",
    "index",
    "method",
    "budget",
    "question",
    "dtype",
    "preset",
    "overrides",
    "rule",
    "exact",
    "score",
    "coverage",
    "selection_recall",
    "attended_tokens",
    "prompt_tokens",
    "resident_share",
    "read_share",
    "read_bytes_per_step",
    "h2d_bytes_per_step",
    "d2h_bytes_per_step",
    "steps",
    "batched",
    "output",
    "answer",
    "passed",
    "infeasible",
    "refused",
    "uid",
    "outcome",
    "left_full_kv_at_step",
    "kl_at_loss_nats",
    "margin_logits",
    "at_stop_token",
)
"""None where a trial has no such figure: an infeasible or refused one has none, `batched` is None of a trial that
decoded alone, `uid` is None without a stored trace;
`dtype` is '' where it is the sweep's own. The last five are docs/trace-schema.md's, What came of a run: without a
stored trace there is no more than 'right answer' or 'wrong answer'."""
FIGURES = (
    "exact",
    "score",
    "coverage",
    "attended_tokens",
    "prompt_tokens",
    "resident_share",
    "h2d_bytes_per_step",
    "d2h_bytes_per_step",
)
"""of a trial that was run, in files of every version"""
NEEDED = ("task", "length", "depth", "seed", "method", "budget", "rule", "exact")


def write(path: Path, about: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Replaces the file in one move; numbers are kept to six significant digits."""
    table = [[_short((_judged(row) | row).get(column)) for column in COLUMNS] for row in rows]
    text = strict_json({"about": about}, indent=1)[:-2] + ',\n "columns": ' + json.dumps(COLUMNS) + ',\n "trials": [\n'
    text += ",\n".join(strict_json(row, separators=(",", ":")) for row in table) + "\n ]\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.part")
    half.write_text(text, encoding="utf-8")
    half.replace(path)


def _judged(row: dict[str, Any]) -> dict[str, Any]:
    """The word of a trial that was compared with no reference."""
    return {"outcome": {None: None, 1.0: "right answer"}.get(row.get("exact"), "wrong answer")}


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def parse(value: Any, name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(about, rows) of a sweep's JSON. Raises ValueError with one sentence."""
    try:
        about, columns, trials = dict(value["about"]), list(value["columns"]), list(value["trials"])
        missing = [column for column in NEEDED if column not in columns]
        if missing:
            raise ValueError(
                f"the sweep '{name}' lacks the column '{missing[0]}'; measure it again with kvlens bench sweep."
            )
        for line, row in enumerate(trials, 1):
            if not isinstance(row, list) or len(row) != len(columns):
                raise ValueError(
                    f"trial {line} of the sweep '{name}' does not have its {len(columns)} columns; measure it again."
                )
    except (KeyError, TypeError):
        raise ValueError(
            f"the file '{name}' does not hold a sweep; measure it again with kvlens bench sweep."
        ) from None
    rows = [
        dict.fromkeys(COLUMNS) | {"question": "in", "dtype": ""} | dict(zip(columns, row, strict=True))
        for row in trials
    ]
    for line, row in enumerate(rows, 1):
        lacks = [column for column in FIGURES if row["exact"] is not None and not isinstance(row[column], (int, float))]
        if lacks:
            raise ValueError(
                f"trial {line} of the sweep '{name}' was run and has no number for '{lacks[0]}'; measure it again."
            )
    return about, rows
