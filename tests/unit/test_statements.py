"""The papers' statements: what is stated can be run, verdicts by made-up figures, trials that are kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_cli import kvlens

from kvlens import methods, tasks
from kvlens.bench.claims import arms, judged, page, written
from kvlens.bench.claims.arms import Place, Rows, places
from kvlens.bench.claims.check import claiming, refuse_others
from kvlens.bench.intervals import paired_shares
from kvlens.engine.engine import Engine
from kvlens.memory.budget import Budget
from kvlens.methods.statements import FIGURES, Arm, Statement, arm, stated

TITLES = {"snapkv": "SnapKV", "full": "FullKV", "random": "Random eviction"}
STATED = [(name, one) for name, method in methods.registry().items() for one in stated(method)]
PAPERLESS = {"full", "random"}
"""what no paper stands behind"""


def test_every_paper_is_asked() -> None:
    """Of each method that a paper stands behind something is checked; a method derived from another does not state that
    one's paper."""
    assert set(methods.registry()) - set(claiming("smollm2")) == PAPERLESS
    derived = type("Derived", (methods.get("snapkv"),), {"name": "derived"})
    assert stated(methods.get("snapkv"))
    assert stated(derived) == ()


@pytest.mark.parametrize(("name", "statement"), STATED, ids=[f"{name}-{one.says[:30]}" for name, one in STATED])
def test_what_is_stated_can_be_run(name: str, statement: Statement) -> None:
    """Arms are methods with parameters of theirs, and differ; the method whose paper it is stands first."""
    assert statement.first.method == name
    assert len(set(statement.arms)) == len(statement.arms)
    assert statement.figure in FIGURES
    assert statement.verdict in ("better", "as good")
    for task in statement.tasks:
        assert not tasks.get(task).demo_language
    for one in statement.arms:
        method = methods.get(one.method)
        dataclasses.replace(methods.make_parameters(method, None, {}), **dict(one.changes))
        assert not one.budget or Budget.parse(one.budget).unit == "share"


def rows_of(statement: Statement, values: dict[Arm, list[float | None]], prompts: int) -> Rows:
    """As if the arms had come to these figures, None: not held."""
    at = places(statement, prompts)
    return {
        (one, place): {"preset": "paper", "resident_share": 0.4, "read_share": 0.3}
        | ({statement.figure: value} if value is not None else {"infeasible": 0.5})
        for one, found in values.items()
        for place, value in zip(at, found, strict=True)
    }


FIRST, OTHER = arm("snapkv", "40%"), arm("snapkv", "40%", kernel=1)


def judge(first: list[float | None], other: list[float | None], **given: Any) -> Any:
    statement = Statement("S", "says", FIRST, (OTHER,), tasks=("niah_single",), **given)
    rows = rows_of(statement, {FIRST: first, OTHER: other}, len(first))
    return judged.judge(statement, "snapkv", rows, len(first), TITLES, "smollm2")


def test_better_needs_an_interval_above_nothing() -> None:
    ten = [1.0] * 10
    assert judge(ten, [0.0] * 10).holds is True
    assert judge([0.0] * 10, ten).holds is False
    alike = judge(ten, ten)
    assert (alike.holds, alike.reason) == (None, "It is not told apart from SnapKV at 40%, kernel=1.")
    assert judge([1.0] * 9, [0.0] * 9).holds is None, "nine prompts decide nothing"


def test_as_good_needs_an_interval_above_the_margin() -> None:
    many = [1.0] * 30
    assert judge(many, many, verdict="as good").holds is True
    few = judge([1.0] * 10, [1.0] * 10, verdict="as good")
    assert few.holds is None, "ten that agree may hide a loss of a tenth"
    assert "not shown to be below the 0.1" in few.reason
    assert judge([0.0] * 15 + [1.0] * 15, many, verdict="as good").holds is False
    worse = judge([0.0] * 3 + [1.0] * 27, many, verdict="as good")
    assert worse.holds is None, "3 of 30: shown to be neither above nor below"


def test_less_is_better_of_kl() -> None:
    low, high = [0.01 + i / 1000 for i in range(12)], [0.5 + i / 1000 for i in range(12)]
    found = judge(low, high, figure="kl")
    assert found.holds is True
    assert "Gain (95 %): +0.490 (+0.490 to +0.490) over SnapKV at 40%, kernel=1, n = 12" in found.measured
    assert "12 passages of 1,024 tokens" in found.measured
    assert judge(high, low, figure="kl").holds is False
    assert judge(high, low, figure="kl", verdict="as good").holds is False


def test_prompts_that_one_arm_cannot_hold_are_no_pairs() -> None:
    found = judge([None] * 5 + [1.0] * 10, [0.0] * 15)
    assert found.holds is True
    assert found.figures["gains"][0]["n"] == 10
    assert found.figures["arms"][0]["infeasible"] == [0.5] * 5
    none = judge([None] * 12, [0.0] * 12)
    assert none.holds is None
    assert "SnapKV at 40% cannot be held, it needs 50%" in none.measured
    assert (
        none.reason == "On 0 prompts both it and SnapKV at 40%, kernel=1 could be run, 10 are needed to compare them."
    )
    json.dumps(written(none), allow_nan=False)


def test_what_cannot_be_run_on_the_model_is_said() -> None:
    statement = Statement("S", "says", FIRST, (OTHER,), tasks=("niah_single",))
    rows = rows_of(statement, {FIRST: [1.0] * 12, OTHER: [None] * 12}, 12)
    rows |= {at: {"refused": "No map of heads."} for at in rows if at[0] == OTHER}
    found = judged.judge(statement, "snapkv", rows, 12, TITLES, "other")
    assert found.holds is None
    assert "kernel=1 cannot be run." in found.measured
    assert found.reason.endswith("10 are needed to compare them. No map of heads.")


def test_one_of_several_others_decides() -> None:
    third = arm("random", "40%")
    statement = Statement("S", "says", FIRST, (OTHER, third), tasks=("niah_single",))
    values: dict[Arm, list[float | None]] = {FIRST: [1.0] * 12, OTHER: [0.0] * 12, third: [1.0] * 12}
    found = judged.judge(statement, "snapkv", rows_of(statement, values, 12), 12, TITLES, "smollm2")
    assert (found.holds, found.reason) == (None, "It is not told apart from Random eviction at 40%.")
    values |= {FIRST: [0.0] * 12}
    found = judged.judge(statement, "snapkv", rows_of(statement, values, 12), 12, TITLES, "smollm2")
    assert (found.holds, found.reason.split(".")[1]) == (False, " It is worse than Random eviction at 40%")


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 40))
def test_an_interval_of_paired_shares(gained: int, lost: int, n: int) -> None:
    if gained + lost > n:
        return
    low, high = paired_shares(gained, lost, n)
    assert low < (gained - lost) / (n + 2) < high
    turned = paired_shares(lost, gained, n)
    assert (-turned[1], -turned[0]) == pytest.approx((low, high))


def test_paired_shares_by_hand() -> None:
    """20 trials, 8 gained and 1 lost: centre 7 / 22, variance (10 / 22 - (7 / 22)^2) / 22."""
    half = 1.96 * ((10 / 22 - (7 / 22) ** 2) / 22) ** 0.5
    assert paired_shares(8, 1, 20) == pytest.approx((7 / 22 - half, 7 / 22 + half))


def test_the_toy_is_not_asked_of_prose() -> None:
    assert set(claiming("demo")) == {"sekv", "chess", "freekv", "sentkv", "compresskv"}
    with pytest.raises(ValueError, match="the claims of 'quest' are tried on prose, which the toy demo does not read"):
        refuse_others(["freekv", "quest"], "demo")
    with pytest.raises(ValueError, match="'random' has no claims; these have: "):
        refuse_others(["random"], "smollm2")


def test_trials_are_kept_and_not_run_again(smollm2: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt of each kind, short ones; a second call runs nothing, and another parameter is another trial."""
    monkeypatch.setattr(arms, "LENGTH", 256)
    text = Statement("S", "t", arm("streaming_llm", "40%"), (arm("full"),), "as good", figure="kl")
    needle = Statement(
        "S", "n", arm("keydiff", "60%"), (arm("random", "60%", window=0),), figure="coverage", tasks=("niah_single",)
    )
    engine, said = Engine(smollm2), list[str]()
    file = tmp_path / "kept.jsonl"
    rows = arms.measure(engine, [text, needle], 1, said.append, file)
    at: list[Place] = [("text", "in", 0), ("niah_single", "in", 0)]
    assert {place for _, place in rows} == set(at)
    assert len(said) == 4
    assert rows[arm("full"), at[0]]["kl"] == pytest.approx(0, abs=1e-9)
    assert rows[arm("streaming_llm", "40%"), at[0]]["kl"] > 0
    seen = rows[arm("keydiff", "60%"), at[1]]
    assert 0 < seen["coverage"] < 1
    assert seen["passed"]
    assert "window" in rows[arm("random", "60%", window=0), at[1]]["overrides"]
    again = arms.measure(engine, [text, needle], 1, said.append, file)
    assert len(said) == 4
    assert again.keys() == rows.keys()
    assert again[arm("keydiff", "60%"), at[1]]["coverage"] == seen["coverage"]


def test_the_page_counts_and_says_all(tmp_path: Path) -> None:
    found = judge([1.0] * 12, [0.0] * 12)
    about = {"date": "2026-01-01", "machine": {"processor": "P", "cores": 2}, "torch": "2", "prompts": 12}
    text = page.document({"methods": {"snapkv": {"about": about, "claims": [written(found)]}}}, "smollm2")
    assert "| [SnapKV](#snapkv) | 1 | 1 | 0 | 0 |\n| all | 1 | 1 | 0 | 0 |" in text
    assert "- **S: says** It holds. Exact match: SnapKV at 40% 1.00" in text


def test_a_page_needs_its_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        kvlens("bench", "claims", "--doc", str(tmp_path / "claims.md"))
    assert "--doc is made of a result file: name it with --out." in capsys.readouterr().err
