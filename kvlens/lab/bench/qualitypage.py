"""Quality tables in words: docs/evidence/quality.md, made of the result files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvlens.budget import Budget
from kvlens.lab.bench.joined import joined, variants_measured, with_variants
from kvlens.lab.bench.textpage import sections
from kvlens.lab.results.formats import NARROW, TITLES, UNKNOWN, narrow_cell
from kvlens.lab.results.names import limit_words, measured_on, name_methods, table_name
from kvlens.models.find import DEMO
from kvlens.text.units import si_bytes

ORDER = {"in": "question read with its context", "after": "question fed after the context was placed"}
INTRODUCTION = """# Quality: every method, the same prompts, the same budgets

Made by `kvlens bench quality`; all figures with their provenance are in `kvlens/lab/results/quality-*.json` and on the
Benchmarks page.

*Number format*: the runs store KV in float32, and budgets are shares of float32 KV. Papers count 16-bit KV. *Resident*
is given for both: the 16-bit share is of the same method and budget with KV in bfloat16, on one prompt of the length
and its first two steps (`kvlens.lab.studies.kv_formats`); —: not measured. Keys and values shrink with the format;
codes of few bits, indices and tables do not. A budget that holds a method in float32 may refuse it in 16 bits: the cell
then says what it needs.

*Budget*: peak bytes of KV on the device inside a decode step, as a share of full KV of prompt and output; everything
held counts (slots, tables, summaries, staging), decoded tokens too. A method whose floor is above the budget is
refused, and the cell says what it needs (mean). A method that keeps all KV on the device by design is held to the same
share of *attended* tokens instead (`keep`); one that has no such parameter is held to nothing. *Preset*: whose
numbers the method ran with: the paper's (`paper`, or `defaults` of a method without presets), or `fit`, the paper's
proportions at this length and budget, where the paper's do not fit. *Exact match* of the answer with the 95 % Wilson
interval and the number of prompts; a list counts when all eight entries are right. *Coverage*: share of full
attention's mass on tokens attended exactly, mean over steps, layers and query heads (rebuilt tokens and summaries do
not count). *Selection recall*: of the k tokens with most of full attention's mass, the share that was attended in any
form but a summary, k being how many tokens the query head attended, mean over the same; k tokens chosen at random
would reach k's share of the prompt. *Attended*: entries in the softmax that are tokens, share of the prompt, per KV
head: where its query heads read different tokens, all of them. *Resident*: peak, as budgets count it. *Read*: bytes
that a step reads, its attended keys and values, summaries and index, as a share of full KV, mean over steps; what a
kernel reads that skips the rest. These columns are means over the tasks, weighted by prompts; —: not measured when
the row was made. What no row of a table has is left out of it.

Controls: FullKV in another number format is the noise floor, what rounding alone changes; random eviction is what a
score has to beat; it keeps the newest tokens as the others do, so its selection recall exceeds its share of tokens. It
keeps no sinks, so that it may lose an answer with the first tokens alone.

Rows of a method whose preset changed since are as they were measured. `docs/evidence/` has later measurements beside
them, presets that depart from a paper and parts that were trained since included.

No preset was chosen on these prompts ([choices](choices.md) says what was chosen on which). Coverage is not an answer:
heads that only look at the first tokens fill it, and one lost needle hardly lowers it. A question that is read with its
context favours methods that drop tokens by what the end of the prompt attends to, since the question is that end.
"""
TOY = """
A toy made here, whose heads are not those of a trained language model: its table shows the instrument, and is no
evidence about methods.
"""
HEAD = {
    "coverage": "coverage",
    "selection_recall": "selection recall",
    "attended_share": "attended",
    "resident_share": "resident",
    "read_share": "read",
    "h2d_bytes_per_step": "to device per step",
}
"""means over the tasks: as lines name them -> as tables do"""
RESIDENT = "resident_share"
NONE = "—"


def document(results: Iterable[dict[str, Any]], texts: Iterable[dict[str, Any]] = ()) -> str:
    """The page of the docs: what the columns mean, and the tables, the toy's last; of free text, `texts` as
    kvlens.lab.bench.freetext writes them. Tables that differ in their budgets alone are one. Where several tables
    have a model, a length and a question in common, their headings name the tasks; where these are alike too, the
    budgets, and the methods if these begin otherwise."""
    requested = [(result, result["about"]["request"]) for result in joined(results)]
    places = Counter(_place(request) for _, request in requested)
    alike = Counter((_place(request), *request["tasks"]) for _, request in requested)
    lists = Counter(key for key, _ in {((_place(each), *each["tasks"]), name_methods(each)) for _, each in requested})
    ordered = sorted(requested, key=lambda item: (_place(item[1]), list(item[1]["tasks"]), _largest(item[1])))
    text, remaining = INTRODUCTION, list(texts)
    for result, request in ordered:
        place = _place(request)
        if place[0]:
            text, remaining = text + sections(remaining), []
        named = [", ".join(request["tasks"])] if places[place] > 1 else []
        named += [f"at {', '.join(request['budgets'])}"] if alike[place, *request["tasks"]] > 1 else []
        if lists[place, *request["tasks"]] > 1:
            named[-1] += f", {name_methods(request)}"
        text += _section(result, " ".join(named))
    return text + sections(remaining)


def _place(request: dict[str, Any]) -> tuple[Any, ...]:
    return request["model"] == DEMO, request["model"], request.get("question", "in") == "after", request["length"]


def _largest(request: dict[str, Any]) -> float:
    return max(Budget.parse(budget).amount for budget in request["budgets"])


def _section(result: dict[str, Any], named: str) -> str:
    request = result["about"]["request"]
    name, toy = request["model"], request["model"] == DEMO
    order = ORDER[request.get("question", "in")]
    more = f": {named}" if named else ""
    title = f"\n## {name}{' (a toy)' if toy else ''}, {request['length']:,} tokens, {order}{more}\n"
    return f"{title}{TOY if toy else ''}{_room(result['about'])}\n{markdown(result)}"


def _room(about: dict[str, Any]) -> str:
    """How much of every budget is the answer's; '' where that was not recorded."""
    length = about["request"]["length"]
    shares = {task: new / (length + new) for task, new in about.get("new_tokens", {}).items()}
    if not shares:
        return ""
    rooms = ", ".join(f"{share:.1%} of full KV on {task}" for task, share in shares.items())
    return (
        f"\nOf every budget the answer's room is taken first, whether or not it is used: {rooms}. A method that fixes\n"
        "its places when the prompt was read keeps so much less of the prompt (*attended*).\n"
    )


def markdown(result: dict[str, Any]) -> str:
    """The table for the docs: a row per method and budget, a column of exact match per task, then the means over the
    tasks that any row has."""
    about, tasks = result["about"], result["about"]["request"]["tasks"]
    presets = about.get("presets", {})
    lines: dict[tuple[str, str, str, str], dict[str, dict[str, Any]]] = {}
    for line in with_variants(result):
        row = line["method"], line["budget"], line.get("dtype", ""), line.get("variant", "")
        lines.setdefault(row, {})[line["task"]] = line
    means = [key for key in HEAD if any(line["n"] and line.get(key) is not None for line in result["lines"])]
    titles = [name for key in means for name in (TITLES if key == RESIDENT else (HEAD[key],))]
    head = ["method", "budget", "preset", *(f"{task}: exact (95 %), n" for task in tasks), *titles]
    rows: list[list[str]] = []
    for (name, budget, dtype, variant), by_task in lines.items():
        ran = dict.fromkeys(preset for line in by_task.values() for preset in line.get("presets", {}))
        title = table_name(name, ran or [presets.get(name)], presets.get(name))
        title += f" in {dtype} (noise floor)" if dtype else ""
        title += f" {variant}" if variant else ""
        tried = any(line["n"] or line["infeasible"] for line in by_task.values())
        preset = _preset(by_task) or ((presets.get(name) or "defaults") if tried else "")
        limit = limit_words(budget, (line["rule"] for line in by_task.values()))
        cells = [title, limit, preset, *(_cell(by_task.get(task)) for task in tasks)]
        usual = variant or presets.get(name)
        requested = next(iter(by_task.values())).get("requested_preset", usual)
        cells += _with_formats(_means(by_task, means), means, about, name, budget, dtype, requested)
        if not rows or not _same(rows[-1], cells):
            rows.append(cells)
        elif cells.count(NONE) < rows[-1].count(NONE):
            rows[-1] = cells
    text = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    text.insert(1, "|---" * len(head) + "|")
    machine, request = about["machine"], about["request"]
    text += [
        "",
        f"{about['trials']:,} of {about['planned']:,} trials, model {request['model']}, {request['length']} tokens, "
        f"{ORDER[request.get('question', 'in')]}, {measured_on(about)}, "
        f"{machine['processor']}, {machine['cores']} cores, torch {about['torch']}, "
        f"transformers {about['transformers']}.{variants_measured(result)}"
        + (f" Amended {about['amended']}." if "amended" in about else ""),
    ]
    return "\n".join(text) + "\n"


def _same(row: list[str], later: list[str]) -> bool:
    """Return whether two rows agree in every cell that both have: rows of a method that no budget holds do."""
    return all(cell == later_cell or NONE in (cell, later_cell) for cell, later_cell in zip(row, later, strict=True))


def _with_formats(
    cells: list[str], means: list[str], about: dict[str, Any], name: str, budget: str, dtype: str, preset: str | None
) -> list[str]:
    """The cells of the means, with the resident share for both number formats, of the same preset."""
    if RESIDENT not in means or not any(cells):
        return cells + [""] * (RESIDENT in means)
    place, request = means.index(RESIDENT), about["request"]
    narrow = narrow_cell(request["model"], request["length"], name, budget, preset)
    shares = [cells[place], narrow]
    if dtype:  # the control's own format is the narrow one
        shares = [UNKNOWN, cells[place]] if dtype == NARROW else [UNKNOWN, UNKNOWN]
    return [*cells[:place], *shares, *cells[place + 1 :]]


def _preset(by_task: dict[str, dict[str, Any]]) -> str:
    """Names of the presets, with the numbers of trials where there are several; empty where trials do not say."""
    counts: dict[str, int] = {}
    for line in by_task.values():
        for name, trials in line.get("presets", {}).items():
            counts[name] = counts.get(name, 0) + trials
    return next(iter(counts)) if len(counts) == 1 else ", ".join(f"{name} {n}" for name, n in counts.items())


def _cell(line: dict[str, Any] | None) -> str:
    if line is None or not (line["n"] or line["infeasible"]):
        return "not judged" if line is not None and line.get("unjudged") else "not run"
    if not line["n"]:
        return f"infeasible, needs {line['smallest_feasible']:.0%}"
    extra = f" (+{line['infeasible']} infeasible)" if line["infeasible"] else ""
    return f"{line['exact']:.2f} ({line['low']:.2f}-{line['high']:.2f}), {line['n']}{extra}"


def _means(by_task: dict[str, dict[str, Any]], columns: list[str]) -> list[str]:
    """Columns of HEAD; empty where nothing was run, a dash where the figure was not measured."""
    sample = [line for line in by_task.values() if line["n"]]
    if not sample:
        return [""] * len(columns)
    shown = []
    for column in columns:
        recorded = [(line["n"], line[column]) for line in sample if line.get(column) is not None]
        if not recorded:
            shown.append(NONE)
            continue
        mean = sum(n * value for n, value in recorded) / sum(n for n, _ in recorded)
        share = column.endswith("_share")
        shown.append(f"{mean:.1%}" if share else si_bytes(mean) if column.endswith("per_step") else f"{mean:.2f}")
    return shown
