"""What crafted traces and models came to, as a page.

    python -m kvlens.lab.studies.damage [--write PAGE]

The page is made from kvlens/lab/results/damage.json and damage-models.json, which `python -m benchmarks.damage` and
`python -m benchmarks.damagemodels` write.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvlens.store.schema import TABLES

RESULTS = Path(__file__).resolve().parents[1] / "results"
PAGE = Path("docs/evidence/damage.md")
Rows = list[dict[str, Any]]


def read(name: str) -> dict[str, Any]:
    """Return a committed result."""
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return result


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table: the first column is text, the others are numbers."""
    names = list(head)
    lines = ["| " + " | ".join(names) + " |", "| --- |" + " ---: |" * (len(names) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def trace_rows(rows: Rows) -> list[list[object]]:
    """One row per group of damage to tables, one for the meta, then the sum."""
    damaged_rows = [row for row in rows if row["open"]]
    groups = list(dict.fromkeys(_group(row) for row in damaged_rows))
    lines = [_trace_row(name, [row for row in damaged_rows if _group(row) == name]) for name in groups]
    return [*lines, _trace_row("**all**", damaged_rows)]


def _group(row: dict[str, Any]) -> str:
    return "values of the meta" if str(row["group"]).startswith("meta: ") else str(row["group"])


def _trace_row(name: str, rows: Rows) -> list[object]:
    driven = [row for row in rows if "consumers" in row]
    opened = sum(row["open"] == "done" for row in rows)
    broken = sum(row["open"].startswith("traceback") for row in rows)
    return [
        name,
        len(rows),
        len(rows) - opened,
        opened,
        len(driven),
        sum(row["consumers"] for row in driven),
        broken + sum(len(row["tracebacks"]) for row in driven),
        sum(len(row["wrong"]) for row in driven),
        sum(len(row["hangs"]) for row in driven),
    ]


def unmeasured(rows: Rows) -> list[str]:
    """Return the tables of the trace format that no row damaged: they are newer than the result."""
    measured = {str(row["kind"]).split(":")[0] for row in rows if row["group"] == "missing table"}
    return [f"`{name}`" for name in TABLES if name not in measured]


def model_rows(rows: Rows) -> list[list[object]]:
    """One row per group of crafted models, then the sum."""
    groups = list(dict.fromkeys(row["group"] for row in rows))
    lines = [_model_row(name, [row for row in rows if row["group"] == name]) for name in groups]
    return [*lines, _model_row("**all**", rows)]


def _model_row(name: str, rows: Rows) -> list[object]:
    outcomes = [text for row in rows for text in row["outcomes"].values()]
    return [
        name,
        len(rows),
        sum(row["outcomes"]["load"] == "refused" for row in rows),
        len(outcomes),
        sum(text.startswith("traceback") for text in outcomes),
        sum(text == "hang" for text in outcomes),
        max(row["grown_bytes"] for row in rows) >> 20,
    ]


def page() -> str:
    """Return the page, Markdown."""
    traces, models = read("damage"), read("damage-models")
    later = unmeasured(traces["rows"])
    unmeasured_sentence = f" Tables that the format did not have then: {', '.join(later)}." if later else ""
    trace_head = (
        "damage",
        "kinds",
        "refused when opened",
        "opened",
        "kinds driven",
        "consumer calls",
        "tracebacks",
        "wrong",
        "hangs",
    )
    model_head = ("crafted", "kinds", "not loaded", "consumer calls", "tracebacks", "hangs", "MiB at most")
    return f"""# Damaged traces and models

Made by `python -m kvlens.lab.studies.damage --write {PAGE}` from committed results. Do not edit.

## Traces

Measured on {traces["about"]["date"]} by `python -m benchmarks.damage`. Each kind is one damage to a run's trace, beside
a good run. Every kind was opened. Kinds driven also met consumers: commands, exports, the API, pages. The first driven
kind of a group met all of them, other kinds met a few. Wrong: a refusal without its sentence, or a command about the
good run that failed.{unmeasured_sentence}

{table(trace_head, trace_rows(traces["rows"]))}

## Models

Measured on {models["about"]["date"]} by `python -m benchmarks.damagemodels`. Consumers: the loader, the sizes asked
before it, the list of models, the reader of chat templates. MiB: by how much the process's peak grew at one kind.

{table(model_head, model_rows(models["rows"]))}
"""


def main() -> None:
    """Print the page or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    if arguments.write is None:
        print(page(), end="")
        return
    arguments.write.parent.mkdir(parents=True, exist_ok=True)
    arguments.write.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
