"""What SeKV gains where the KV heads of a layer, or all of the model, share the room for expanded spans.

    python -m kvlens.lab.studies.sekv_zones [--prompts N] [--length TOKENS] [--budget SHARE] [--task TASK]
        [--out FILE] [--doc FILE]

Every arm runs the same prompts with the question known: read with its context. The parameters are those that the
quality tables run with; an arm changes `zones` alone, and `no-coarse` is another preset. Each prompt is run twice under
every arm: freely, for the answer, and fed the tokens of full KV, for all other figures, so that steps compare.

It is no study of kvlens.studies: it reads the layout and the counts of zones inside each step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from kvlens import methods
from kvlens.budget import Budget
from kvlens.engine.engine import Engine, Options
from kvlens.engine.models import load
from kvlens.lab.bench.provenance import about
from kvlens.lab.bench.trialprompts import DEPTHS, Prompts, Trial
from kvlens.lab.bench.trials import chosen, header, outcome
from kvlens.lab.studies.sekv_zone_watch import Decisions, Watched
from kvlens.methods.naming import display_name
from kvlens.methods.sekv.method import SeKV
from kvlens.shape import KVShape
from kvlens.statistics import of_mean, sign_test, wilson
from kvlens.tiers.layout import Layout

FIRST_SEED, NEW = 8_400_000, 12
ZONES = ("head", "layer", "model")
OTHER = "no-coarse"
FIGURES = ("zoom_rate", "refused_spans", "refused_tokens", "room_used", "h2d_bytes", "logprob", "peak_share")


def room(layout: Layout, shape: KVShape) -> int:
    """Return the slots for expanded spans of all KV heads."""
    of_heads = sum(
        layout.zones_of(layer, head).recall for layer in range(shape.layers) for head in range(shape.kv_heads)
    )
    return of_heads + sum(layout.shared)


def measure(model: str, task: str, prompts: int, length: int, budget: str) -> dict[str, Any]:
    """Run every arm on every prompt -> {"about", "rows"}."""
    torch.set_num_threads(1)
    engine, limit, full = Engine(load(model)), Budget.parse(budget), methods.get(methods.REFERENCE)
    prompt_maker, rows, names = Prompts(engine, FIRST_SEED, ("full", "sekv")), [], {}
    for index in range(prompts):
        trial = Trial(task, length, DEPTHS[index % len(DEPTHS)], FIRST_SEED + index, index, "sekv", budget)
        request, prompt, read = prompt_maker.asked(trial), prompt_maker.prompt(trial), prompt_maker.read(trial, SeKV)
        free = Options(NEW, planned=NEW)
        usual = chosen(engine, prompt, SeKV, header(trial, model), limit, free)
        arms = {f"zones={name}": replace(usual.params, zones=name) for name in ZONES}
        arms[OTHER] = methods.make_parameters(SeKV, OTHER, {})
        reference = engine.run(prompt, full, full.Parameters(), None, free, read=read)
        rows.append({"index": index, "arm": "full"} | outcome(request, reference.text))
        forced = replace(free, forced=tuple(reference.ids), coverage=True, oracle="off")
        for arm, params in arms.items():
            names[arm] = display_name("sekv", {"router": params.router})
            answer = engine.run(prompt, Watched, params, limit, free, read=read)
            sink = Decisions()
            result = engine.run(prompt, Watched, params, limit, forced, sink, read=read)
            slots = room(Watched.layouts[0], engine.loaded.shape)
            whole = engine.loaded.shape.full_kv_bytes(len(prompt.ids) + NEW)
            rows.append(
                {"index": index, "arm": arm, "preset": OTHER if arm == OTHER else usual.preset, "slots": slots}
                | outcome(request, answer.text)
                | sink.figures(slots)
                | {"peak_share": result.peak_bytes / whole, "passed": all(check.passed for check in result.checks)}
            )
            print(json.dumps(rows[-1]), flush=True)
    size = {"model": model, "task": task, "length": length, "budget": budget, "prompts": prompts, "new": NEW}
    facts = {"first_seed": FIRST_SEED, "question": "in", "dtype": "float32", "names": names}
    return {"about": about(("sekv",), model) | size | facts, "rows": rows}


def table(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line per arm: n, exact match with its Wilson interval, prompts that it gains and loses against equal
    parts, and of each figure its mean and the 95 % interval of its paired difference to equal parts."""
    arms: dict[str, dict[int, dict[str, Any]]] = {}
    for row in rows:
        arms.setdefault(row["arm"], {})[row["index"]] = row
    base, lines = arms[f"zones={ZONES[0]}"], []
    for arm, by_index in arms.items():
        n, exact = len(by_index), fmean(row["exact"] for row in by_index.values())
        line: dict[str, Any] = {"arm": arm, "n": n, "exact": exact}
        line |= dict(zip(("low", "high"), wilson(exact, n), strict=True))
        pairs = [(row["exact"], base[index]["exact"]) for index, row in by_index.items()]
        line["gained"], line["lost"] = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
        line["p"] = sign_test(line["gained"], line["lost"])
        for name in FIGURES if arm != "full" else ():
            values = [row[name] for row in by_index.values()]
            line[name] = fmean(values)
            line[f"{name}_more"] = of_mean([row[name] - base[index][name] for index, row in by_index.items()])
        lines.append(line)
    return lines


def page(result: dict[str, Any]) -> str:
    """Return docs/evidence/sekv-zones.md."""
    facts, lines = result["about"], table(result["rows"])
    text = INTRODUCTION.format(**facts, processor=facts["machine"]["processor"], cores=facts["machine"]["cores"])
    head = "| method | zones | preset | exact (95 %), n | won / lost | zoom rate | refused, spans | refused, tokens |"
    text += f"\n{head} room used | nats per token | to device per step | peak |\n" + "|---" * 12 + "|\n"
    presets = {row["arm"]: row.get("preset", "") for row in result["rows"]}
    for line in lines:
        arm = line["arm"]
        exact = f"{line['exact']:.2f} ({line['low']:.2f}-{line['high']:.2f}), {line['n']}"
        if arm == "full":
            cells = ["FullKV", "", "", exact, *[""] * 8]
        else:
            title, zones = facts["names"][arm], arm.removeprefix("zones=") if arm != OTHER else "head"
            more = "" if arm == f"zones={ZONES[0]}" else f"{line['gained']} / {line['lost']}"
            name = f"{title} {OTHER}" if arm == OTHER else title
            cells = [name, zones, presets[arm], exact, more, *_figures(line)]
        text += f"| {' | '.join(cells)} |\n"
    return text + "\n" + _differences(lines)


def _figures(line: dict[str, Any]) -> list[str]:
    shares = [f"{line[name]:.1%}" for name in ("zoom_rate", "refused_spans", "refused_tokens", "room_used")]
    return [*shares, f"{line['logprob']:.2f}", f"{line['h2d_bytes'] / 1e3:,.0f} kB", f"{line['peak_share']:.1%}"]


def _differences(lines: Sequence[dict[str, Any]]) -> str:
    """Return the paired differences to equal parts, with their intervals."""
    text = "Paired differences to `zones=head` on the same prompts, with 95 % intervals of the mean:\n\n"
    text += "| zones | zoom rate | refused, tokens | room used | nats per token |\n|---|---|---|---|---|\n"
    for line in lines:
        if line["arm"] in (f"zones={name}" for name in ZONES[1:]):
            cells = [line["arm"].removeprefix("zones=")]
            for name, scale, unit in (
                ("zoom_rate", 100, " points"),
                ("refused_tokens", 100, " points"),
                ("room_used", 100, " points"),
                ("logprob", 1, ""),
            ):
                mean, within = line[name], line[f"{name}_more"]
                difference = (mean - lines_mean(lines, name)) * scale
                interval = "" if within is None else f" ({within[0] * scale:+.2f} to {within[1] * scale:+.2f})"
                cells.append(f"{difference:+.2f}{unit}{interval}")
            text += f"| {' | '.join(cells)} |\n"
    return text


def lines_mean(lines: Sequence[dict[str, Any]], name: str) -> float:
    """Return a figure of the arm with equal parts."""
    return float(next(line[name] for line in lines if line["arm"] == f"zones={ZONES[0]}"))


INTRODUCTION = """# SeKV: who shares the room for expanded spans

Made by `python -m kvlens.lab.studies.sekv_zones`; the rows are in `kvlens/lab/results/sekv_zones.json`.

The paper has one budget (sec. 3.3): "we keep spans in decreasing order of [the gate] until the budget is filled". With
`zones=head` every KV head of every layer has an equal part of the room. With `layer` the KV heads of a layer share one
room, with `model` all KV heads of all layers do. The presets `paper` and `fit` use `model`.

| condition | value |
|---|---|
| model | {model}, float32 |
| task | {task}, {length} tokens, question read with its context |
| budget | {budget} of full KV in float32 |
| prompts | {prompts}, first seed {first_seed}; the same for every arm |
| new tokens | {new} |
| machine | {processor}, {cores} cores, torch {torch}, {date} |

*Exact match* is of a free run. All other figures are of a run that is fed the tokens of full KV, so that steps compare.
*Zoom rate*: expanded spans as a share of the spans that could be expanded, mean over steps, layers and query heads.
*Refused*: share of the spans, or of their tokens, that KV heads asked for and that did not fit. *Room used*: tokens
that were asked for and granted, as a share of the slots for expanded spans, mean over steps. *Nats per token*: mean log
probability of full KV's tokens. *Won / lost*: prompts answered right here alone, and under `zones=head` alone.
"""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--task", default="niah_single")
    parser.add_argument("--prompts", type=int, default=15)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--budget", default="20%")
    parser.add_argument("--out", type=Path, default=Path("build/sekv_zones.json"))
    parser.add_argument("--doc", type=Path, help="the page of the docs")
    arguments = parser.parse_args()
    result = measure(arguments.model, arguments.task, arguments.prompts, arguments.length, arguments.budget)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.doc:
        arguments.doc.parent.mkdir(parents=True, exist_ok=True)
        arguments.doc.write_text(page(result), encoding="utf-8")


if __name__ == "__main__":
    main()
