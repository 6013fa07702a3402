"""The loss-ledger study as tables of docs/evidence/ledger.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlens.lab.results.names import table_name
from kvlens.ledger.causes import CAUSES, NAMES, REST
from kvlens.ledger.signals import SIGNALS

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
"""marks in the page between which the tables stand"""


def write_page(path: Path, document: dict[str, Any]) -> None:
    """Renew the tables of the page. Raises ValueError for a page without the marks."""
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"'{path.name}' has no place for the tables: put {BEGIN} and {END} into it.")
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    path.write_text(f"{head}{BEGIN}\n\n{tables(document)}\n{END}{tail}", encoding="utf-8")


def tables(document: dict[str, Any]) -> str:
    """Return the tables as Markdown."""
    total = sum(row["n"] for row in document["methods"])
    within = sum(row["within"] for row in document["methods"])
    about = document["about"]
    return "\n".join(
        [
            f"{total} lost answers of {len(document['methods'])} methods on {about['model']}, {about['length']} "
            f"tokens, {about['budget']} of full KV (or 1.02 times a method's smallest budget). The rest is at "
            f"most 5 % of the lead lost in {within} of {total}.",
            "",
            "Mean shares of the lead lost, by method:",
            "",
            _shares([(_name(row["method"], about), row) for row in document["methods"]], "method"),
            "",
            "By task, all methods together:",
            "",
            _shares([(f"{row['task']}, question {row['question']}", row) for row in document["tasks"]], "task"),
            "",
            _repairs(document["repairs"]),
            "",
            "Distance to the oracle frontier, medians. Times: peak resident bytes over the frontier's of the same "
            "prompt:",
            "",
            _frontier(document["frontier"], about),
            "",
            "Which signal of a step foresees that the step's token is lost. Area under the ROC curve, 95 % interval by "
            "a bootstrap over answers. 0.50 foresees nothing; below 0.50 a smaller signal goes with a loss:",
            "",
            _signals(document["signals"]),
            "",
            "![ROC curves of the five signals: lost tokens that each calls lost, against kept tokens](roc.svg)",
            "",
        ]
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _shares(rows: Sequence[tuple[str, dict[str, Any]]], heading: str) -> str:
    causes = (*CAUSES, REST)
    columns = [heading, "n", "lead lost (logits)", *(NAMES[cause] for cause in causes)]
    filled = [
        [name, row["n"], f"{row['lead_lost']:.1f}", *(_percent(row["shares"][cause]) for cause in causes)]
        for name, row in rows
        if row["n"]
    ]
    return _table(columns, filled)


def _percent(share: float) -> str:
    return "" if abs(share) < 5e-4 else f"{share:.1%}"


def _repairs(repairs: dict[str, Any]) -> str:
    places = {1: "largest", 2: "second largest"}
    rows = [
        [f"{places.get(row['place'], 'third largest or later')} cause", *_restored(row)] for row in repairs["by_place"]
    ]
    rows += [[f"*{NAMES[row['cause']]}*, whichever place", *_restored(row)] for row in repairs["by_cause"]]
    only = repairs["only_cause"]
    sentences = (
        f"The check by intervention, on the {repairs['several']} lost answers with two causes or more.",
        f"Repairing the largest cause alone, and no other alone, restored {repairs['largest_only']};",
        f"another cause and not the largest restored {repairs['another_only']}.",
        f"Of the {only['n']} answers with one cause, its repair restored {only['restored']}.",
    )
    columns = ["repaired alone", "answers back", "n", "95 % interval"]
    return f"{' '.join(sentences)}\n\n{_table(columns, rows)}"


def _restored(row: dict[str, Any]) -> list[object]:
    return [row["restored"], row["n"], "" if row["low"] is None else f"{row['low']:.0%} to {row['high']:.0%}"]


def _name(method: str, about: dict[str, Any]) -> str:
    """Return the method as tables name it, its stand-ins included."""
    return table_name(method, [about["presets"].get(method)])


def _frontier(rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> str:
    head, *methods = rows
    filled = [["oracle frontier", f"{head['share']:.1%}", "", "", "", ""]] if head["n"] else []
    filled += [
        [
            _name(row["method"], about),
            f"{row['share']:.1%}",
            row["kept"],
            _times(row["times_kept"]),
            row["lost"],
            _times(row["times_lost"]),
        ]
        for row in methods
        if row["n"]
    ]
    columns = ["", "resident, of full KV", "answers kept", "times", "answers lost", "times"]
    return _table(columns, filled)


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _signals(rows: Sequence[dict[str, Any]]) -> str:
    filled = [
        [
            SIGNALS[row["signal"]],
            "not enough" if row["auc"] is None else f"{row['auc']:.2f}",
            "" if row["low"] is None else f"{row['low']:.2f} to {row['high']:.2f}",
            f"{row['n']:,}",
            row["lost"],
            row["answers"],
        ]
        for row in rows
    ]
    return _table(["signal", "AUC", "interval", "steps", "lost", "answers"], filled)
