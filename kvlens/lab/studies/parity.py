"""Write docs/parity.md: the presses of kvpress and the caches of transformers down, kvlens's ways across.

Usage: python -m kvlens.lab.studies.parity [--write docs/parity.md]. Reads the results of
`benchmarks/observe_presses.py`, `benchmarks/observe_caches.py` and `benchmarks/oracle.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kvlens import PACKAGE

RESULTS = PACKAGE / "lab" / "results"
EVERY_KEY = "every key"
"""the rule by which a kept set is compared: each key with each written key"""
NO_CUDA = "not compiled with CUDA"
"""in the refusal of a cache that needs a GPU, on a machine without one"""


def expression(chain: list[list[Any]]) -> str:
    """Return presses that wrap each other, the outermost first, as one expression. The share that is removed is left
    out: it follows from the budget."""
    (name, fields), *inner = chain
    parts = [expression(inner)] if inner else []
    parts += [f"{field}={value}" for field, value in fields.items() if field != "compression_ratio"]
    return f"{name}({', '.join(parts)})" if parts else str(name)


def own_methods(results: Path = RESULTS) -> dict[str, tuple[str, str]]:
    """Return press -> (the method of kvlens that `make oracle` found to keep the same tokens, the press's whole
    expression there)."""
    rows = json.loads((results / "oracle.json").read_text(encoding="utf-8"))["methods"]
    found: dict[str, tuple[str, str]] = {}
    for row in rows:
        press, method = row["press"][0][0], str(row["method"])
        if not method.startswith("kvpress:") and row["sets_equal"]:
            found.setdefault(press, (method, expression(row["press"])))
    return found


def _cells(row: dict[str, Any], methods: dict[str, tuple[str, str]]) -> list[str]:
    """Return the table's cells of one press."""
    method, kept_by = methods.get(row["press"], ("-", ""))
    names = [
        f"`{row.get('made', row['press'])}`",
        f"`{method}`: `{kept_by}`" if kept_by else method,
        "yes" if row["by_score"] else "-",
    ]
    if "failed" in row:
        return [*names, f"failed: {row['failed']}", *["-"] * 8]
    kept = "equal" if row["rule"] == EVERY_KEY else "all entries found"
    return [
        *names,
        "equal" if row["tokens_equal"] else "differ",
        kept if row["kept_equal"] else "differs",
        *(f"{row[name]:,}" for name in ("exact", "rotated", "rewritten", "ambiguous", "unmatched")),
        f"{row['cpu_s']:.2f}",
        f"{row['observed_cpu_s']:.2f}",
    ]


def _own_lines(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of presses beside kvlens's own runs."""
    lines = [
        "## Presses beside kvlens's own runs",
        "",
        "The same prompt, model and number of kept tokens: kvlens runs its method, kvpress runs the press under "
        "`kvlens.observe`. A set is what one KV head of one layer attends in one step.",
        "",
        "| model | prompt tokens | kept | method | press | sets equal | tokens | own output | observed output | "
        "coverage differs by |",
        "| --- | ---: | ---: | --- | --- | --- | --- | --- | --- | ---: |",
    ]
    notes: list[str] = []
    for row in rows:
        if row["note"] and row["note"] not in notes:
            notes.append(row["note"])
        mark = f" ({notes.index(row['note']) + 1})" if row["note"] else ""
        press = f"`{row['press']}`" + (f", then `{row['decoding']}`" if row["decoding"] else "")
        cells = [
            row["model"],
            f"{row['prompt_tokens']:,}",
            f"{row['kept_tokens']:,}",
            f"`{row['method']}`{mark}",
            press,
            f"{row['sets_equal']:,} of {row['sets']:,}",
            "equal" if row["tokens_equal"] else "differ",
            *(f"`{row[name].strip()}`" for name in ("own_output", "observed_output")),
            f"{row['coverage_differs_at_most']:g}",
        ]
        lines.append(f"| {' | '.join(cell.replace(chr(0xFFFD), '?') for cell in cells)} |")
    return [*lines, "", *(f"({number}) {_sentence(note)}" for number, note in enumerate(notes, 1)), ""]


def _sentence(note: str) -> str:
    return note[0].upper() + note[1:] + "."


def _main_lines(results: Path, released: set[str]) -> list[str]:
    """Return what was measured of kvpress's main branch."""
    result: dict[str, Any] = json.loads((results / "observed-main.json").read_text(encoding="utf-8"))
    rows = result["rows"]
    equal = sum(bool(row.get("tokens_equal") and row.get("kept_equal")) for row in rows)
    names = {row["press"] for row in rows} | set(result["need_downloads"])
    failed = ", ".join(row["press"] for row in rows if "failed" in row) or "none"
    return [
        "## kvpress's main branch",
        "",
        f"kvpress {result['kvpress']} is the newest snapshot that was at hand. The table above is newer.",
        "",
        "| measured | tokens and kept sets equal | failed | need downloads | in no table | only in the release |",
        "| ---: | ---: | --- | --- | --- | --- |",
        f"| {len(rows)} | {equal} | {failed} | {', '.join(result['need_downloads'])} | "
        f"{', '.join(result['not_listed']) or 'none'} | {', '.join(sorted(released - names)) or 'none'} |",
        "",
    ]


def _cache_lines(results: Path, here: list[dict[str, Any]]) -> list[str]:
    """Return the table of caches. here: rows of the oracle's environment."""
    files = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(results.glob("caches-*.json"))]
    measured = {row["transformers"] for file in files for row in file}
    rows = [row for row in here if row["transformers"] not in measured] + [row for file in files for row in file]
    on_cuda = {row["cache"] for row in rows if row.get("device") == "cuda" and "refused" not in row}
    rows = [row for row in rows if not (row["cache"] in on_cuda and NO_CUDA in row.get("refused", ""))]
    order = list(dict.fromkeys(row["cache"] for row in rows))
    rows.sort(key=lambda row: (order.index(row["cache"]), _release(row), row.get("device") == "cuda"))
    lines = [
        "## Caches",
        "",
        "`make observe-versions` makes the CPU's rows and runs `tests/unit/test_observing.py` under each version.",
        "Rows of a GPU: `python -m benchmarks.observe_caches FILE --device cuda`.",
        "",
        "| cache | transformers | device | backend | tokens | exact | rewritten | unmatched | error, most | refused |",
        "| --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        cells = [row["cache"], row["transformers"], row.get("device", "cpu"), row.get("backend") or "-"]
        if "refused" in row:
            absent = "backend" in row and row["backend"] is None
            cells += ["-"] * 5 + ["not measured: the backend was not installed" if absent else f"`{row['refused']}`"]
        else:
            equal = "equal" if row["tokens_equal"] else "differ"
            counts = [f"{row[name]:,}" for name in ("exact", "rewritten", "nothing")]
            cells += [equal, *counts, f"{row['largest_error']:g}", "-"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _release(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(part) for part in row["transformers"].split(".")[:2])


def page(results: Path = RESULTS) -> str:
    """Return the page. results: folder of observed.json, observed-main.json, oracle.json and caches-VERSION.json."""
    result: dict[str, Any] = json.loads((results / "observed.json").read_text(encoding="utf-8"))
    own, rows = own_methods(results), result["rows"]
    alike = sum(bool(row.get("tokens_equal")) for row in rows)
    comparable = [row for row in rows if row.get("rule") == EVERY_KEY]
    counted = [row for row in rows if row.get("rule") not in (None, EVERY_KEY)]
    failed, missing = [row["press"] for row in rows if "failed" in row], result["not_listed"]
    lines = [
        "# Parity with kvpress and transformers",
        "",
        "Generated by `python -m kvlens.lab.studies.parity --write docs/parity.md` from "
        "`kvlens/lab/results/observed.json` and `oracle.json`.",
        "",
        f"kvpress {result['kvpress']}, transformers {result['transformers']}, torch {result['torch']}; a random Llama "
        f"of 3 layers, 4 query heads and 2 KV heads, {result['context_tokens']} context tokens, float32, CPU.",
        "",
        f"Tokens are equal with and without observation for {alike} of {len(rows)} presses. "
        f"{sum(bool(row['kept_equal']) for row in comparable)} of {len(comparable)} comparable kept sets are equal; of "
        f"{len(counted)} presses only the number of entries can be compared.",
        f"Failed: {', '.join(failed) or 'none'}. Presses of kvpress that are in no table: "
        f"{', '.join(missing) or 'none'}.",
        "",
        "| column | meaning |",
        "| --- | --- |",
        "| press | as it was made here |",
        "| own method | kvlens's method, and the press's expression whose tokens (ThinK: channels) it keeps "
        "(`make oracle`), without the share that is removed |",
        "| by score | `kvpress:NAME` runs the press inside kvlens |",
        "| tokens | equal with and without `kvlens.observe` |",
        "| kept set | *equal*: the positions found equal those of the cache, by a comparison of every key with every "
        "written key. *all entries found*: the press alters keys or values, so that only the number of entries can be "
        "compared, none of which is unmatched |",
        "| exact, rotated, rewritten | attended entries by their match (docs/observing.md), over all steps |",
        "| ambiguous | of these, entries of which more equal keys were written than stayed |",
        "",
        "## Presses",
        "",
        "| press | own method | by score | tokens | kept set | exact | rotated | rewritten | ambiguous | unmatched | "
        "CPU s | observed CPU s |",
        "| --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [f"| {' | '.join(_cells(row, own))} |" for row in rows]
    lines += ["", "Not measured, for lack of what they download:", "", "| press | needs |", "| --- | --- |"]
    lines += [f"| {press} | {what} |" for press, what in sorted(result["need_downloads"].items())]
    lines += ["", "Test: `benchmarks/observe_presses.py`, which fails where a token or a kept set differs.", ""]
    lines += _own_lines(result["own"])
    lines += _main_lines(results, {row["press"] for row in rows} | set(result["need_downloads"]))
    return "\n".join([*lines, *_cache_lines(results, result["caches"]), ""])


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    if options.write is None:
        print(page())
    else:
        options.write.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
