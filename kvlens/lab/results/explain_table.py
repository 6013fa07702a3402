"""From the trials of `kvlens bench explain` to the table and its page of the docs. Plain Python; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

from kvlens import methods, tasks
from kvlens.lab.results.names import measured_on, table_name
from kvlens.models.find import DEMO
from kvlens.statistics import wilson

TOPS = (1, 5, 20)
RANDOM = 5
"""triples that are drawn"""
SHOWN = "shown"
SCOPES = {
    SHOWN: "the order that a stored run shows: effect on the lost steps of the answer, in rounds (docs/lens.md)",
    "effect": "effect on the choice, added over the lost steps of the forced run",
    "step": "regret at the step of loss",
    "steps": "regret added over the lost steps of the forced run",
}
OWN_QUERY, FULL_KV = "own query", "full KV"
"""whose masses the effects of the shown order were computed from, as `about` names them; stored runs show FULL_KV"""
SAID = {SHOWN: "shown", "effect": "effect", "step": "step", "steps": "lost steps"}
"""the same in a heading"""
ARMS = (*(f"{scope}_top{top}" for scope in SCOPES for top in TOPS), *(f"random{top}" for top in TOPS), "everywhere")
"""what is held, as the rows name it"""


def points(model: str = DEMO) -> tuple[tuple[str, str, str], ...]:
    """(method, task, budget) to look for lost answers at: on the demo model where each method loses at 2048 tokens, by
    its own word; on any other, three tasks in real prose at 10 %."""
    results = {name: method for name, method in methods.registry().items() if name != methods.REFERENCE}
    if model == DEMO:
        return tuple((name, *method.loses_at) for name, method in results.items())
    return tuple((name, task, "10%") for name in results for task in tasks.PROSE[:3])


def point_of(row: dict[str, Any]) -> tuple[str, str, str]:
    """Return (method, task, budget) of a trial."""
    return row["method"], row["task"], row["budget"]


def pooled(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return n and arms of all lost trials together, by kind of answer and by the text around it where the task draws
    these."""
    lost = [row for row in rows if row["lost"]]
    groups = {"all": lost}
    for column, title in (("kind", ""), ("source", "text: ")):
        for value in sorted({row[column] for row in lost if column in row}):
            groups[title + value] = [row for row in lost if row.get(column) == value]
    return {name: {"n": len(group), "arms": _shares(group)} for name, group in groups.items()}


def summarise(rows: Sequence[dict[str, Any]], points: Sequence[tuple[str, str, str]]) -> Iterator[dict[str, Any]]:
    """One line per point: presets (of the lost trials), prompts, lost trials n, candidates (triples, mean), and per arm
    the share restored with its 95 % Wilson interval. agreed: not the expected answer, yet full KV's token at every step
    of the forced run, so there is nothing to attribute. of_everywhere: of the trials that holding the needle everywhere
    restores, the share that the arm restores as well."""
    for method, task, budget in points:
        own_rows = [row for row in rows if point_of(row) == (method, task, budget)]
        lost = [row for row in own_rows if row["lost"]]
        line: dict[str, Any] = {
            "method": method,
            "task": task,
            "budget": budget,
            "presets": sorted({row.get("preset") or "defaults" for row in lost}),
            "prompts": len(own_rows),
            "n": len(lost),
            "infeasible": sum("infeasible" in row for row in own_rows),
            "refused": sum("refused" in row for row in own_rows),
            "agreed": sum("agreed" in row for row in own_rows),
            "candidates": fmean(row["candidates"] for row in lost) if lost else None,
        }
        line["arms"] = _shares(lost)
        line["of_everywhere"] = _shares([row for row in lost if row.get("everywhere")])
        yield line


def _shares(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    results = {arm: [row[arm] for row in rows if row.get(arm) is not None] for arm in ARMS}
    return {arm: _share(restored) for arm, restored in results.items() if restored}


def _share(restored: Sequence[bool]) -> dict[str, float]:
    share = fmean(restored)
    low, high = wilson(share, len(restored))
    return {"share": share, "low": low, "high": high, "n": len(restored)}


INTRODUCTION = """# How good the lens is

Made by `kvlens bench explain`; all figures with their provenance are in `kvlens/lab/results/explain-*.json` and on the
Benchmarks page.

Each trial is an answer that full KV gives and the method loses. The run is stored beside its full-KV run, and its
triples (layer, KV head, span) are ranked. Then the free run is repeated, everything else as it was, with some triples
held exactly resident from step 0. *Restored* means that the free run's answer is right. A *lost step* is a step of a
run along full KV's tokens at which the most probable token is not full KV's.

| column | order of the triples |
| --- | --- |
| shown | that of the stored run's pages, report and API (docs/lens.md) |
| shown before | the same with effects of own-query masses, which pages showed before 2026-11-26 |
| effect | by effect on the choice, added once over the lost steps, up to 31 behind the first |
| step | by regret (full attention's mass minus the method's, mean over the KV head's query heads) at the step of loss |
| lost steps | by regret, added over all lost steps |
| random | as many triples drawn from all |
| everywhere | every span of the needle held for every head |

Cells are shares of the n lost trials with the 95 % Wilson interval. A table has columns for the rankings that it was
measured with alone; older tables have others. A column that was measured on some of the prompts names their number.
The question was read with its context when the method placed it. Keys and values are float32.

*Where five are too few* is about the answers that the first five triples do not restore. *Fewest* is the number of the
ranking's first triples that restore an answer, by bisection between five and twenty.
"""


def document(results: Iterable[dict[str, Any]]) -> str:
    """The page of the docs: what was done, and the tables, the toy's last."""
    ordered = sorted(results, key=lambda result: (result["about"]["model"] == DEMO, result["about"]["model"]))
    return INTRODUCTION + "".join(_section(result) for result in ordered)


def _section(result: dict[str, Any]) -> str:
    about = result["about"]
    toy = " (a toy)" if about["model"] == DEMO else ""
    budgets = sorted({line["budget"] for line in result["lines"]}, key=lambda budget: float(budget.rstrip("%")))
    measured_at = "".join(f", {task}" for task in about.get("tasks", ())) + f", {' and '.join(budgets)}"
    older = "" if _is_shown(about) else ", rankings that pages do not show"
    return f"\n## {about['model']}{toy}, {about['length']:,} tokens{measured_at}{older}\n\n{markdown(result)}"


def _is_shown(about: dict[str, Any]) -> bool:
    """Return whether the table ranks as stored runs show it now."""
    return SHOWN in about["scopes"] and about.get("masses") != OWN_QUERY


def markdown(result: dict[str, Any]) -> str:
    """A row per point, a column per arm."""
    sentence = result["about"]
    known_names = {arm for line in result["lines"] for arm in line["arms"]}
    arms = [arm for arm in ARMS if arm in known_names]
    shown = "shown before" if sentence.get("masses") == OWN_QUERY else SAID[SHOWN]
    titles = " | ".join(_heading(arm, shown) for arm in arms)
    text = [f"| method, preset, task, budget | n (triples) | {titles} |", "|---" * (len(arms) + 2) + "|"]
    for line in result["lines"]:
        presets = line.get("presets") or [sentence.get("presets", {}).get(line["method"]) or "defaults"]
        start = f"{table_name(line['method'], presets)}, {' or '.join(presets)}, {line['task']}, {line['budget']}"
        cells = (
            [_cell(line["arms"][arm], line["n"]) if arm in line["arms"] else "not measured" for arm in arms]
            if line["n"]
            else ["no lost trial"] * len(arms)
        )
        text.append(
            f"| {start} | {line['n']}"
            + (f" ({line['candidates']:.0f})" if line["n"] else "")
            + f" | {' | '.join(cells)} |"
        )
    text += _by_kind(result.get("pooled", {}), shown)
    text += _shortfall(result.get("few", {}))
    machine = sentence["machine"]
    parts = [f"{name}: {n}" for name, n in sentence.get("trials_by_device", {}).items()]
    text += [
        "",
        f"Model {sentence['model']}, {sentence['length']} tokens, {measured_on(sentence)}, {machine['processor']}, "
        f"{machine['cores']} cores, "
        f"torch {sentence['torch']}, transformers {sentence['transformers']}."
        + (f" Prompts tried, by machine: {'; '.join(parts)}." if len(parts) > 1 else ""),
    ]
    return "\n".join(text) + "\n"


def _by_kind(groups: dict[str, Any], shown: str) -> list[str]:
    """Return the table of all lost trials together and by kind of answer; nothing where no kinds were drawn."""
    if len(groups) < 2:
        return []
    arms = [arm for arm in ARMS if arm in groups["all"]["arms"]]
    rows = [
        "",
        f"| answers of all methods | n | {' | '.join(_heading(arm, shown) for arm in arms)} |",
        "|---" * (len(arms) + 2) + "|",
    ]
    for name, group in groups.items():
        cells = [_cell(group["arms"][arm], group["n"]) if arm in group["arms"] else "not measured" for arm in arms]
        rows.append(f"| {name} | {group['n']} | {' | '.join(cells)} |")
    return rows


def _shortfall(few: dict[str, Any]) -> list[str]:
    """Return the table of why five triples did not do; nothing where five always did, or where it was not measured."""
    if not few.get("n"):
        return []
    rows = [("answers that the first five do not restore", few["n"]), ("of these, restored by twenty", few["twenty"])]
    if few["fewest"] is not None:
        middle, least, most = few["fewest"]
        rows.append(("fewest of the ranking that restore these: median (range)", f"{middle:g} ({least}-{most})"))
        rows.append((f"of the {few['twenty']}, restored by spans of at most five KV heads", few["cut"]))
    if few["in_needle"] is not None:
        rows.append(("of the first five, spans of the needle (mean)", f"{few['in_needle']:.1f}"))
        rows.append(("spans that the needle lies in (mean)", f"{few['needle_spans']:.1f}"))
    if few["outputs"]:
        rows.append(("outputs with five held that have the answer's first half", f"{few['later']} of {few['outputs']}"))
    return ["", "| where five are too few | |", "|---|---|", *(f"| {name} | {figure} |" for name, figure in rows)]


def _heading(arm: str, shown: str) -> str:
    """Return the heading of an arm's column. shown: what the shown order is called."""
    scope, _, top = arm.rpartition("_top")
    if scope in SAID:
        return f"{shown if scope == SHOWN else SAID[scope]}, top {top}"
    return arm.replace("random", "random ")


def _cell(share: dict[str, float], n: int) -> str:
    """n: of the line; an arm that was measured on fewer says on how many."""
    fewer = "" if share.get("n", n) == n else f", {share['n']} of {n}"
    return f"{share['share']:.2f} ({share['low']:.2f}-{share['high']:.2f}){fewer}"
