"""`kvlens check-method` on methods of each family, as a page.

    python -m kvlens.lab.studies.check_methods [--methods A,B] [--result FILE] [--write PAGE]

Without --methods it runs nothing and makes the page of the stored result.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlens import __version__, methods
from kvlens.checking.check import TRUTHS, check_method
from kvlens.lab.studies.damage import table
from kvlens.models.device import machine

RESULT = Path(__file__).resolve().parents[1] / "results" / "check_method.json"
PAGE = Path("docs/evidence/check-method.md")
METHODS = ("streaming_llm", "snapkv", "h2o", "quest", "arkvale", "chess", "freekv", "sekv", "kivi", "sentkv")
"""of each family one at least, and systems that differ most in what they move"""


def measure(names: Sequence[str], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Check the methods and return a report of each, with the date, the seconds and the machine. say(line): hears of
    each method."""
    import torch

    rows = []
    for name in names:
        start_time = time.monotonic()
        report = check_method(methods.get(name)).plain()
        wall_s = round(time.monotonic() - start_time, 1)
        place = {"kvlens": __version__, "torch": torch.__version__, "machine": machine()}
        rows.append(report | {"wall_s": wall_s, "date": time.strftime("%Y-%m-%d", time.gmtime())} | place)
        say(f"{name}: {'pass' if report['passed'] else 'FAIL'}, {wall_s:.0f} s")
    return rows


def merge(stored: Sequence[Mapping[str, Any]], measured: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return one report per method, the measured one where there are two, in the order of METHODS."""
    reports = {str(row["method"]): row for row in (*stored, *measured)}
    order = {name: place for place, name in enumerate((*METHODS, *sorted(set(reports) - set(METHODS))))}
    return sorted(reports.values(), key=lambda row: order[str(row["method"])])


def page(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return the page, Markdown."""
    lines = [
        [
            methods.get(str(report["method"])).title,
            sum(row["status"] == "pass" for row in report["truths"]),
            sum(row["status"] == "FAIL" for row in report["truths"]),
            sum(row["cases"] for row in report["truths"]),
            len(report["refused"]),
            f"{report['wall_s']:.0f}",
            report["date"],
        ]
        for report in reports
    ]
    failures = [
        f"- {methods.get(str(report['method'])).title}, *{row['says']}*: expected "
        f"{row['failure']['mismatch']['expected']}, got {row['failure']['mismatch']['actual']}."
        for report in reports
        for row in report["truths"]
        if row["failure"] is not None
    ]
    totals = [[f"`{truth}`", says, *_cases(reports, truth)] for truth, says in TRUTHS.items()]
    head = ("method", "truths that pass", "fail", "cases", "cases refused", "seconds", "date")
    return f"""# Methods checked by check-method

Made by `python -m kvlens.lab.studies.check_methods --write {PAGE}` from `kvlens/lab/results/check_method.json`. Do not
edit. `kvlens check-method NAME` checks one method. [Adding a method](../adding-a-method.md) says what it runs. A case
is one truth on one model, prompt and budget. A case is refused where the method does not take the prompt or the budget.
On random models a method runs with its untrained parts (SeKV: `router=pca`), on `demo` with its trained ones.

{table(head, lines)}

{chr(10).join(failures) if failures else "No truth failed."}

## Truths

{table(("truth", "sentence", "methods that pass", "cases"), totals)}
"""


def _cases(reports: Sequence[Mapping[str, Any]], truth: str) -> tuple[str, int]:
    rows = [row for report in reports for row in report["truths"] if row["truth"] == truth]
    tried = [row for row in rows if row["cases"]]
    return f"{sum(row['status'] == 'pass' for row in tried)} of {len(tried)}", sum(row["cases"] for row in rows)


def main() -> None:
    """Check the methods asked for, and print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    reports = json.loads(arguments.result.read_text(encoding="utf-8")) if arguments.result.is_file() else []
    for name in filter(None, arguments.methods.split(",")):
        reports = merge(reports, measure((name,), print))
        arguments.result.write_text(json.dumps(reports, indent=1) + "\n", encoding="utf-8")
    if arguments.write is None:
        print(page(reports), end="")
    else:
        arguments.write.write_text(page(reports), encoding="utf-8")


if __name__ == "__main__":
    main()
