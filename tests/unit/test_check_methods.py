"""The page of methods that `check-method` checked, and the reports that it is made of."""

from __future__ import annotations

import json
from typing import Any

from kvlens import PACKAGE, methods
from kvlens.checking.check import TRUTHS
from kvlens.lab.studies.check_methods import METHODS, PAGE, RESULT, merge, page


def _report(method: str, failing: str = "", date: str = "2026-01-01") -> dict[str, Any]:
    failure = {"mismatch": {"expected": "5.25", "actual": "7.75"}}
    truths = [
        {"truth": truth, "says": says, "status": "FAIL" if truth == failing else "pass", "cases": 3}
        | {"failure": failure if truth == failing else None}
        for truth, says in TRUTHS.items()
    ]
    return {"method": method, "truths": truths, "refused": [], "passed": not failing, "wall_s": 9.0, "date": date}


def test_a_later_report_takes_the_place_of_an_older_one() -> None:
    reports = merge([_report("kivi"), _report("snapkv", "masses")], [_report("snapkv", date="2026-01-02")])
    assert [(report["method"], report["date"]) for report in reports] == [
        ("snapkv", "2026-01-02"),
        ("kivi", "2026-01-01"),
    ]


def test_a_truth_that_fails_is_counted_and_named() -> None:
    text = page([_report("snapkv", "masses"), _report("kivi")])
    assert f"| SnapKV | {len(TRUTHS) - 1} | 1 | {3 * len(TRUTHS)} |" in text
    assert "7.75" in text
    assert "| 1 of 2 | 6 |" in text


def test_the_committed_page_is_of_every_family_and_all_pass() -> None:
    reports = json.loads(RESULT.read_text(encoding="utf-8"))
    assert [report["method"] for report in reports] == list(METHODS)
    families = {each.family for each in methods.registry().values()} - {"reference"}
    assert families == {methods.get(name).family for name in METHODS}
    assert all(report["passed"] and len(report["truths"]) == len(TRUTHS) for report in reports)
    assert (PACKAGE.parent / PAGE).read_text(encoding="utf-8") == page(reports)
