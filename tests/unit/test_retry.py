"""What a refused run's sentence says would do, as options of the next one."""

from __future__ import annotations

import pytest

from kvlens.memory.budget import BudgetInfeasible
from kvlens.ui.common import retry
from kvlens.ui.common.jobs import Job

ARGV = ["python", "-m", "kvlens", "run", "p.json", "--method", "m", "--budget", "10%", "--runs", "runs"]


def refused(instead: str = "", command: str = "run") -> Job:
    message = str(BudgetInfeasible("m", 100, 235, 1000, instead))
    return Job("j", [*ARGV[:3], command, *ARGV[4:]], "t", 0.0, message=message)


@pytest.mark.parametrize(
    ("instead", "options", "label"),
    [
        ("", {"--budget": "23.5%"}, "Run again with the budget 23.5%"),
        (
            "raise --budget to 0.120 with --preset fit",
            {"--budget": "12.0%", "--preset": "fit"},
            "Run again with the budget 12.0% and the preset fit",
        ),
        ("run with --preset fit, or raise --budget to 0.300", {"--preset": "fit"}, "Run again with the preset fit"),
    ],
)
def test_the_advice_of_a_refusal_becomes_a_button(instead: str, options: dict[str, str], label: str) -> None:
    job = refused(instead)
    assert retry.advice(job) == options
    assert retry.label(options) == label
    made = retry.again(job.argv, options)
    assert {name: made[made.index(name) + 1] for name in options} == options
    assert len(made) == len(ARGV) + 2 * ("--preset" in options)
    assert "--" not in retry.spoken(str(job.message))


def test_what_names_no_option_has_no_button() -> None:
    assert retry.advice(refused("it keeps all KV on the device: leave out --budget")) == {}
    assert retry.advice(refused(command="whatif")) == {}
    assert retry.advice(Job("j", ARGV, "t", 0.0)) == {}
    assert retry.spoken("--stop takes text.") == "--stop takes text."
