"""`kvlens doctor`: passes on a sound installation, fails with status 1 where a check does."""

from __future__ import annotations

import json
import sys

import pytest

from kvlens import __version__
from kvlens.cli import doctor
from kvlens.cli.main import main
from kvlens.methods import DEFAULT
from kvlens.runs import stock


def run_doctor(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command in this process; return its exit status."""
    monkeypatch.setattr(sys, "argv", ["kvlens", "doctor", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_doctor_prints_facts_then_checks_and_passes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_doctor(monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    verdicts = [line.startswith(("pass  ", "FAIL  ")) for line in lines]
    assert verdicts == sorted(verdicts), "every fact is above every check"
    assert lines[0].split() == ["kvlens", __version__]
    assert sum(verdicts) > len(doctor.CORE) + 2
    assert any(f"under {DEFAULT} at budget {doctor.BUDGET}:" in line for line in lines)


def test_doctor_as_json_has_every_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor(monkeypatch, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert {"kvlens", "python", "torch", "devices", "default model"} <= set(report["facts"])
    assert all(check["passed"] for check in report["checks"])
    assert {"package torch", doctor.STOCK, "peak within budget"} <= {check["name"] for check in report["checks"]}


def test_a_failed_check_is_named_and_ends_with_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stock, "stock_gap", lambda device: (0.25, 255))
    assert run_doctor(monkeypatch, "--json") == 1
    failed = [check for check in json.loads(capsys.readouterr().out)["checks"] if not check["passed"]]
    assert [check["name"] for check in failed] == [doctor.STOCK]


def test_a_budget_that_cannot_be_held_is_a_failed_check_and_no_end_of_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BUDGET", "5%")
    ended = list(doctor.checks())
    assert [check.passed for check in ended] == [True] * (len(ended) - 1) + [False]
    assert ended[-1].detail.startswith("budget_infeasible: ")
