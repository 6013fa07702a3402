"""The table that the ablation of SeKV comes to."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvlens.lab.studies.sekv_arms import Case, arms
from kvlens.statistics import wilson


def summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One line per task, length, budget and arm: n, exact match with its Wilson interval, means of the rest."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["length"], row["budget"], row["arm"], row["task"]), []).append(row)
    out, order = [], list(arms())
    for (length, budget, arm, task), members in sorted(
        groups.items(), key=lambda g: (*g[0][:2], order.index(g[0][2]), g[0][3])
    ):
        judged = [row for row in members if "exact" in row]
        line: dict[str, Any] = {"task": task, "length": length, "budget": budget, "arm": arm, "n": len(judged)}
        line["infeasible"] = len(members) - len(judged)
        if judged:
            line["exact"] = float(np.mean([row["exact"] for row in judged]))
            line["low"], line["high"] = wilson(line["exact"], len(judged))
            for name in [name for name in judged[0] if name not in ("key", "exact", *Case.__dataclass_fields__)]:
                values = [row[name] for row in judged if row[name] is not None]
                line[name] = float(np.mean(values)) if values else None
        out.append(line)
    return out


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: both tasks in one row, exact match apart, the other figures as means over both."""
    tasks = sorted({line["task"] for line in lines})
    columns = (
        "tokens",
        "budget",
        "arm",
        *(f"{task}: exact (95 %), n" for task in tasks),
        "characters",
        "zoom rate",
        "coverage",
        "spans",
        "rank K / V",
        "error K / V",
        "stored / raw",
        "lie raw",
        "moved per step",
    )
    text = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for place in dict.fromkeys((line["length"], line["budget"], line["arm"]) for line in lines):
        total = {line["task"]: line for line in lines if (line["length"], line["budget"], line["arm"]) == place}
        judged = [line for line in total.values() if line["n"]]

        def mean(name: str, form: str, judged: list[dict[str, Any]] = judged) -> str:
            values = [line[name] for line in judged if line.get(name) is not None]
            return format(float(np.mean(values)), form) if values else ""

        stored, raw = mean("span_bytes", ".0f"), mean("raw_bytes", ".0f")
        held = bool(raw) and float(raw) > 0
        pairs = [
            " / ".join(filter(None, (mean(f"{name}_{x}", form) for x in "kv")))
            for name, form in (("rank", ".1f"), ("err", ".2f"))
        ]
        cells = [str(place[0]), str(place[1]), place[2], *(_exact(total.get(task)) for task in tasks)]
        cells += [
            mean("characters", ".2f"),
            mean("zoom_rate", ".3f"),
            mean("coverage", ".2f"),
            mean("spans", ".0f") if held else "",
            *pairs,
        ]
        cells += [f"{float(stored) / float(raw):.2f}" if held else "", mean("raw_share", ".2f")]
        cells += [f"{float(mean('h2d_bytes_per_step', '.1f')) / 1024:.0f} KiB" if judged else ""]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def _exact(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    refused = f" (+{line['infeasible']} infeasible)" if line["infeasible"] and line["n"] else ""
    return (
        f"{line['exact']:.2f} ({line['low']:.2f}-{line['high']:.2f}), {line['n']}{refused}"
        if line["n"]
        else "infeasible"
    )
