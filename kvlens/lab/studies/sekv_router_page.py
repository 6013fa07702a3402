"""The tables of docs/evidence/sekv-router.md: how SeKV's router was trained, and what it brings.

    python -m kvlens.lab.studies.sekv_router_page --rows FILE,... --machine FILE --log FILE
    python -m kvlens.lab.studies.sekv_router_page --doc FILE

The first form makes kvlens/lab/results/sekv_router.json of the rows of `kvlens.lab.studies.sekv_router`, of a file that
says what they were run on, and of the training's log. The second form writes the tables of that file into the page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from kvlens.lab.results.summary import summary
from kvlens.lab.studies.sekv_router import ARMS, CELLS, read_rows
from kvlens.methods.sekv.trained import SHIPPED
from kvlens.statistics import of_mean, sign_test
from kvlens.text.units import si_bytes

RESULTS = Path(__file__).parents[1] / "results" / "sekv_router.json"
PARTS = ("loss", "distill", "zoom", "recon", "budget", "zoom_rate", "hit_rate", "rank_k", "rank_v")
SHOWN = 6
"""held-out evaluations that the page shows, evenly spaced"""
NAMES = {
    "full": "FullKV",
    "trained": "SeKV",
    "untrained": "SeKV (untrained router)",
    "trained, all that fits": "SeKV, all that fits",
    "untrained, all that fits": "SeKV (untrained router), all that fits",
    "no-coarse": "SeKV no-coarse",
}


def collect(rows: Sequence[dict[str, Any]], log: Sequence[dict[str, Any]], machine: dict[str, Any]) -> dict[str, Any]:
    """Return the file of results."""
    provenance = json.loads(SHIPPED["smollm2"].with_suffix(".json").read_text())
    cells = {cell.name: [row for row in rows if row["cell"] == cell.name] for cell in CELLS}
    return {
        "about": {"machine": machine, "training": {**provenance, "log": len(log)}},
        "curve": curve(log),
        "cells": {name: lines(of_cell) for name, of_cell in cells.items() if of_cell},
    }


def curve(log: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return of every evaluation the parts of the objective: held out, and mean over the steps since the last one."""
    points, since = [], 0
    for place, line in enumerate(log):
        if "held_out_loss" in line:
            steps = log[since : place + 1]
            point: dict[str, Any] = {"step": line["step"], "length": line["length"]}
            for name in PARTS:
                point[f"held_out_{name}"] = line[f"held_out_{name}"]
                point[name] = round(fmean(step[name] for step in steps if step[name] == step[name]), 6)
            points.append(point)
            since = place + 1
    return points


def lines(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line per arm of one cell: its figures, and the prompts that it alone or the untrained router alone
    answers."""
    arms = {arm: {row["index"]: row for row in rows if row["arm"] == arm} for arm in ("full", *ARMS)}
    table = []
    for arm, by_index in arms.items():
        if not by_index:
            continue
        members = list(by_index.values())
        line = {"arm": arm} | {k: v for k, v in summary(members).items() if k not in ("rule", "presets")}
        line["refused"] = sum(row.get("refused") is not None for row in members)
        base = arms["untrained"]
        pairs = [(row, base[i]) for i, row in by_index.items() if i in base and "exact" in row and "exact" in base[i]]
        line["gained"] = sum(row["exact"] > rival["exact"] for row, rival in pairs)
        line["lost"] = sum(row["exact"] < rival["exact"] for row, rival in pairs)
        line["p"] = sign_test(line["gained"], line["lost"])
        decided = {i: row["decided"] for i, row in by_index.items() if row.get("decided")}
        if decided:
            line["decided"] = mean_of(list(decided.values())) | {"n": len(decided)}
            both = [(each, base[i]["decided"]) for i, each in decided.items() if base.get(i, {}).get("decided")]
            line["decided"]["logprob_more"] = of_mean([each["logprob"] - rival["logprob"] for each, rival in both])
        table.append(line)
    return table


def mean_of(members: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the mean of every figure."""
    return {name: fmean(each[name] for each in members) for name in members[0]}


def training_tables(result: dict[str, Any]) -> Iterator[str]:
    """The lines of the tables about the training."""
    facts = result["about"]["training"]
    settings, params = facts["training"], facts["parameters"]
    drawn = facts["steps"] * settings["batch"]
    lengths = ", ".join(f"{length:,}" for length in settings["lengths"])
    yield "| | paper (sec. 4.1, app. A) | here |"
    yield "|---|---|---|"
    yield f"| steps, sequences a step | about 3,000, 8 | {facts['steps']:,}, {settings['batch']} |"
    yield f"| sequence length, curriculum | 8K to 32K tokens | {lengths} tokens, a third of the steps each |"
    places = " / ".join(f"{settings['kept_tokens'] // length:,}" for length in settings["lengths"])
    yield f"| sequences | about 24,000, 0.5 billion tokens | {drawn:,} drawn from {places} places |"
    yield (
        f"| text | RedPajama: arXiv, books, code | three novels and Python's standard library, "
        f"{facts['documents']['tokens']:,} tokens in {facts['documents']['training'] + facts['documents']['held_out']} "
        f"documents, {facts['documents']['held_out']} held out |"
    )
    yield f"| window | 512 | {params['window']} |"
    yield f"| d', R_max, L_min | 32, 32, 16 | {params['dim']}, {params['max_rank']}, {params['l_min']} |"
    yield (
        f"| optimizer | AdamW 1e-3, decay 0.01, 10 % warm-up, cosine | AdamW {settings['learning_rate']:g}, decay "
        f"{settings['weight_decay']:g}, {settings['warmup']:.0%} warm-up, cosine |"
    )
    yield (
        f"| lambda 1, 2, 3; beta; w+; rho; tau | 1, 0.5, 0.1; 0.1; 10; 0.9; 0.05 | {settings['lambda_zoom']:g}, "
        f"{settings['lambda_recon']:g}, {settings['lambda_budget']:g}; {settings['beta']:g}; {settings['w_plus']:g}; "
        f"{settings['rho']:g}; {settings['tau']:g} |"
    )
    yield f"| positions of the distillation | all | the last {settings['suffix']} of a sequence |"
    yield "| numbers | bfloat16 | float32, products in TF32; places kept in float16 |"
    yield (
        f"| device, time | 8 A100, 2 to 6 hours | {facts['device']}, {facts['seconds']:,.0f} s, {facts['date']}, "
        f"torch {facts['versions']['torch']} |"
    )
    yield ""
    yield "| step | trained at, tokens | " + " | ".join(f"held-out {name.replace('_', ' ')}" for name in PARTS) + " |"
    yield "|---" * (len(PARTS) + 2) + "|"
    points = result["curve"]
    for point in [*points[: -1 : max(1, len(points) // SHOWN)], *points[-1:]]:
        values = " | ".join(f"{point[f'held_out_{name}']:.3f}" for name in PARTS)
        yield f"| {point['step']:,} | {point['length']:,} | {values} |"
    yield ""
    places = f"{settings['evaluate_on']} places of {settings['lengths'][-1]:,} tokens"
    yield f"Held-out figures are always of the same {places}."


def row_tables(result: dict[str, Any]) -> Iterator[str]:
    """The lines of the tables about the answers and about what is asked for."""
    yield (
        "| task, tokens, budget | method | exact (95 %), n | won / lost | coverage | attended | resident | read | "
        "moved |"
    )
    yield "|---" * 9 + "|"
    for cell in CELLS:
        for line in result["cells"].get(cell.name, []):
            yield f"| {_place(cell)} | {NAMES[line['arm']]} | {' | '.join(_cells(line))} |"
    yield ""
    yield (
        "| task, tokens, budget | method | n | zoom rate | asked | granted | refused | refused, tokens | "
        "nats per token | more than untrained (95 %) |"
    )
    yield "|---" * 10 + "|"
    for cell in CELLS:
        for line in result["cells"].get(cell.name, []):
            if decided := line.get("decided"):
                counts = " | ".join(f"{decided[name]:,.0f}" for name in ("asked", "granted", "refused"))
                more = decided["logprob_more"] if line["arm"] != "untrained" else None
                gain = "" if more is None else f"{more[0]:+.2f} to {more[1]:+.2f}"
                yield (
                    f"| {_place(cell)} | {NAMES[line['arm']]} | {decided['n']} | {decided['zoom_rate']:.1%} | "
                    f"{counts} | {decided['refused_tokens']:.1%} | {decided['logprob']:.2f} | {gain} |"
                )


def _place(cell: Any) -> str:
    order = ", question fed after" if cell.question == "after" else ""
    return f"{cell.task}, {cell.length:,}, {cell.budget or 'no limit'}{order}"


def _cells(line: dict[str, Any]) -> list[str]:
    if not line["n"]:
        words = "refused" if line["refused"] else f"infeasible, needs {line['smallest_feasible']:.0%}"
        return [words, *[""] * 6]
    exact = f"{line['exact']:.2f} ({line['low']:.2f}-{line['high']:.2f}), {line['n']}"
    pairs = "" if line["arm"] in ("full", "untrained") else f"{line['gained']} / {line['lost']}"
    shares = [f"{line[name]:.1%}" for name in ("attended_share", "resident_share", "read_share")]
    return [exact, pairs, f"{line['coverage']:.2f}", *shares, si_bytes(line["h2d_bytes_per_step"])]


def fill(page: str, result: dict[str, Any]) -> str:
    """Return the page with the tables between its marks."""
    for mark, table in (("training", training_tables(result)), ("rows", row_tables(result))):
        begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
        head, _, rest = page.partition(begin)
        page = f"{head}{begin}\n" + "\n".join(table) + f"\n{end}" + rest.partition(end)[2]
    return page


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="")
    parser.add_argument("--machine", type=Path)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--doc", type=Path)
    arguments = parser.parse_args()
    if arguments.rows:
        rows = read_rows([Path(name) for name in arguments.rows.split(",")])
        machine = json.loads(arguments.machine.read_text())
        RESULTS.write_text(json.dumps(collect(rows, read_rows([arguments.log]), machine), indent=1) + "\n")
    if arguments.doc:
        arguments.doc.write_text(fill(arguments.doc.read_text(), json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
