"""What a refused run says would do, as options of the next one."""

from __future__ import annotations

import json

import pytest

from kvlens.app.ui.common import retry
from kvlens.app.ui.common.joblog import read_line
from kvlens.app.ui.common.jobs import Job
from kvlens.budget import BudgetInfeasible
from kvlens.cli.progress import JsonLines

ARGV = ["python", "-m", "kvlens", "run", "p.json", "--method", "m", "--budget", "10%", "--runs", "runs"]


@pytest.mark.parametrize(
    ("refusal", "options", "label"),
    [
        (BudgetInfeasible("m", 100, 235, 1000), {"--budget": "23.5%"}, "Run again with the budget 23.5%"),
        (
            BudgetInfeasible("m", 100, 235, 1000, "do both", {"budget": "0.120", "preset": "fit"}),
            {"--budget": "12.0%", "--preset": "fit"},
            "Run again with the budget 12.0% and the preset fit",
        ),
        (
            BudgetInfeasible("m", 100, 235, 1000, "run with --preset fit", {"preset": "fit"}),
            {"--preset": "fit"},
            "Run again with the preset fit",
        ),
        (BudgetInfeasible("m", 100, 1078, 1000), {"--budget": "100.0%"}, "Run again with no limit"),
    ],
)
def test_what_a_refusal_says_would_do_becomes_a_button(
    refusal: BudgetInfeasible, options: dict[str, str], label: str, capsys: pytest.CaptureFixture[str]
) -> None:
    JsonLines().failed(refusal)
    job = Job("j", list(ARGV), "t", 0.0)
    read_line(job, capsys.readouterr().out.strip())
    assert job.message == str(refusal)
    assert retry.advice(job) == options
    assert retry.label(options) == label
    made = retry.again(job.argv, options)
    assert {name: made[made.index(name) + 1] for name in options} == options
    assert len(made) == len(ARGV) + 2 * ("--preset" in options)
    assert "--" not in retry.spoken(job)
    job.argv[3] = "whatif"
    assert retry.advice(job) == {}


def test_what_names_no_option_has_no_button(capsys: pytest.CaptureFixture[str]) -> None:
    JsonLines().failed(BudgetInfeasible("m", 100, 235, 1000, "it keeps all KV on the device: leave out --budget"))
    said = capsys.readouterr().out.strip()
    assert "would_do" not in json.loads(said)
    job = Job("j", list(ARGV), "t", 0.0)
    assert retry.advice(job) == {}
    read_line(job, said)
    assert retry.advice(job) == {}
    assert "--" not in retry.spoken(job)
    assert "--budget" in str(job.message)
