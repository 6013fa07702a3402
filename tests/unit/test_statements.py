"""The papers' statements: what is stated can be run, verdicts by made-up figures, trials that are kept."""

from __future__ import annotations

import json
import re
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest
from support import raises_code
from test_cli import kvlens

from kvlens import PACKAGE, methods, tasks
from kvlens.budget import Budget
from kvlens.engine.engine import Engine
from kvlens.lab.bench import tablestudy
from kvlens.lab.bench.passages import apart, begins, passage
from kvlens.lab.bench.passagetrials import Passages
from kvlens.lab.bench.sources import running
from kvlens.lab.bench.textrequest import FreeTextRequest
from kvlens.lab.bench.trialprompts import DEPTHS, Prompts, Trial
from kvlens.lab.bench.trials import carry_out, settings
from kvlens.lab.claims import Claim, arm_evidence, armstudy, check, page, written
from kvlens.lab.claims.armstudy import Place, Rows, places
from kvlens.lab.claims.check import claiming, planned, refuse_others, statements_of
from kvlens.lab.claims.family import decide
from kvlens.lab.claims.plan import PASSAGES, Plan, plan_lines
from kvlens.lab.claims.stored_claims import judge_again
from kvlens.methods.fitting import Sizes, choose, with_changes
from kvlens.methods.statements import FIGURES, LONG, SHORT, Arm, Statement, arm, list_statements
from kvlens.runs.request import RunRequest
from kvlens.shape import KVShape
from kvlens.studies import storage
from kvlens.studies.table import Results
from kvlens.studies.trialplan import tokens_of
from kvlens.tasks.texts import sentences

SMOLLM2 = KVShape(30, 9, 3, 64, 4)
TITLES = {"snapkv": "SnapKV", "full": "FullKV", "random": "Random eviction"}
STATED = [(name, one) for name, method in methods.registry().items() for one in statements_of(method)]
PAPERLESS = {"full", "random", "random_decode"}
"""what no paper stands behind"""


def test_every_paper_is_asked() -> None:
    """Of each method that a paper stands behind something is checked; a method derived from another does not state that
    one's paper."""
    assert set(methods.registry()) - set(claiming("smollm2")) == PAPERLESS
    statements = (Statement("S", "says", arm("own"), (arm("full"),)),)
    own = type("Own", (methods.get("snapkv"),), {"name": "own", "statements": statements})
    derived = type("Derived", (own,), {"name": "derived"})
    assert list_statements(own) == statements
    assert list_statements(derived) == ()
    assert statements_of(derived) == ()


@pytest.mark.parametrize(("name", "statement"), STATED, ids=[f"{name}-{one.says[:30]}" for name, one in STATED])
def test_what_is_stated_can_be_run(name: str, statement: Statement) -> None:
    """Arms are methods with parameters of theirs, and no two are one run on the real model; first stands the method
    whose paper it is."""
    assert statement.first.method == name
    assert statement.figure in FIGURES
    assert statement.verdict in ("better", "as good", "alike", "within")
    assert bool(statement.others) == (statement.verdict != "within") == (statement.bounds is None)
    run = []
    for task in statement.tasks:
        assert not tasks.get(task).demo_language
    for one in statement.arms:
        method = methods.get(one.method)
        assert not one.budget or Budget.parse(one.budget).unit == "share"
        preset, overrides, rule = settings(method, "smollm2", one.budget)
        limit = Budget.parse(one.budget).bytes(SMOLLM2, 1088) if rule == "resident bytes" else None
        sizes = Sizes(SMOLLM2, 1023, 64, limit)
        found = with_changes(method, choose(method, None, preset, overrides, sizes), dict(one.changes))
        run.append((one.method, limit, found.params))
        assert "keep" not in overrides or "tokens" not in dict(one.changes), "keep goes before tokens"
    assert all(one != other for one, other in combinations(run, 2))


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


def decided(statement: Statement, rows: Rows, prompts: int, model: str = "smollm2") -> Any:
    """The claim of a paper that states nothing else."""
    (claim,) = decide([arm_evidence.judge(statement, "snapkv", rows, prompts, TITLES, model, 1)])
    return claim


def judge(first: list[float | None], other: list[float | None], **given: Any) -> Any:
    statement = Statement("S", "says", FIRST, (OTHER,), tasks=("niah_single",), **given)
    rows = rows_of(statement, {FIRST: first, OTHER: other}, len(first))
    return decided(statement, rows, len(first))


def test_better_needs_an_interval_above_nothing() -> None:
    ten = [1.0] * 10
    assert judge(ten, [0.0] * 10).holds is True
    assert judge([0.0] * 10, ten).holds is False
    alike = judge(ten, ten)
    assert (alike.holds, "SnapKV at 40%, kernel=1" in alike.reason) == (None, True)
    assert "told apart" in alike.reason
    assert judge([1.0] * 9, [0.0] * 9).holds is None, "nine prompts decide nothing"


def test_as_good_needs_more_pairs_than_agree_by_chance() -> None:
    many = [1.0] * 36
    assert judge(many, many, verdict="as good").holds is True
    few = judge([1.0] * 20, [1.0] * 20, verdict="as good")
    assert few.holds is None, "twenty that agree hide a loss of a tenth in 12 % of cases"
    assert few.test.p_holds == pytest.approx(0.9**20, abs=1e-6)
    assert (few.test.n, few.test.needs) == (20, 71)
    assert page.verdict_words(written(few)) == "is not decided: n = 20, needs n = 71"
    fails = judge([1.0] * 30, [0.0] * 20 + [1.0] * 10, verdict="as good")
    assert fails.holds is None, "where the other fails, nothing can be lost"
    assert (fails.test.p_holds, fails.test.needs) == (1.0, None)
    assert judge([0.0] * 15 + [1.0] * 15, [1.0] * 30, verdict="as good").holds is False
    worse = judge([0.0] * 3 + [1.0] * 27, [1.0] * 30, verdict="as good")
    assert worse.holds is None, "3 of 30: shown to be neither above nor below"


def test_alike_looks_to_both_sides() -> None:
    many, most = [1.0] * 40, [0.0] * 16 + [1.0] * 24
    assert judge(many, many, verdict="alike").holds is True
    assert judge(many, most, verdict="alike").holds is False
    assert judge(most, many, verdict="alike").holds is False
    assert judge(many, [0.0] * 3 + [1.0] * 37, verdict="alike").holds is None


def test_all_claims_of_a_paper_are_judged_together() -> None:
    """5 gained of 20 pass alone; beside three claims that show nothing they do not. A count is no test."""
    gained = judge([1.0] * 20, [0.0] * 6 + [1.0] * 14)
    nothing = judge([1.0] * 20, [1.0] * 20)
    assert gained.holds is True
    assert [claim.holds for claim in decide([gained, nothing, nothing, nothing])] == [None] * 4
    count = Claim("snapkv", "S", "says", "m", True)
    assert [claim.holds for claim in decide([gained, count, count, count])] == [True] * 4


def _rounded(value: Any) -> Any:
    """Return figures to ten digits: the last ones of a sum differ between processors."""
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_rounded(part) for part in value]
    return float(f"{value:.10g}") if isinstance(value, float) else value


def test_published_claims_are_judged_again_to_the_same_page() -> None:
    """All verdicts, intervals and p values follow from the stored figures, and the page is made of them."""
    result = json.loads((PACKAGE / "lab" / "results" / "claims-smollm2.json").read_text(encoding="utf-8"))
    again = json.loads(json.dumps(judge_again(result)))
    assert _rounded(again) == _rounded(result)
    docs = PACKAGE.parent / "docs" / "evidence" / "claims.md"
    assert page.document(again, "smollm2") == docs.read_text(encoding="utf-8")


def test_stored_claims_are_judged_again() -> None:
    """From the figures of their prompts: a verdict of another version is not believed."""
    result = json.loads((PACKAGE / "lab" / "results" / "claims-smollm2.json").read_text(encoding="utf-8"))
    freekv = {"methods": {"freekv": result["methods"]["freekv"]}}
    assert judge_again(freekv) == json.loads(json.dumps(freekv))
    changed = json.loads(json.dumps(freekv))
    for claim in changed["methods"]["freekv"]["claims"]:
        if claim["test"]:
            claim["holds"] = True
    assert judge_again(changed) == freekv
    changed["methods"]["freekv"]["claims"][-1]["says"] = "another"
    with raises_code("claim_unknown"):
        judge_again(changed)


def test_prompts_are_planned_by_power() -> None:
    plans = planned(["freekv", "streaming_llm"], "smollm2")
    assert [row.prompts for row in plans["streaming_llm"]] == [
        min(row.needs, PASSAGES) for row in plans["streaming_llm"]
    ]
    for row in plans["freekv"]:
        assert row.pairs >= row.needs
        assert row.level == 0.025 / len(plans["freekv"])
    fixed = planned(["freekv"], "smollm2", 10)["freekv"]
    assert {row.prompts for row in fixed} == {10}
    lines = plan_lines({"freekv": fixed}, TITLES)
    assert len(lines) == len(fixed) + 1
    assert sum("may stay undecided" in line for line in lines) == sum(row.pairs < row.needs for row in fixed) > 0


def test_a_refutation_needs_more_where_there_are_several() -> None:
    """5 lost of 10 on one of five: beyond 95 % alone, and not among five."""
    others = [arm("random", f"{share}%") for share in (10, 20, 30, 40, 50)]
    zero, one = [0.0] * 5 + [1.0] * 5, [1.0] * 10
    for number, holds in ((1, False), (5, None)):
        statement = Statement("S", "says", FIRST, tuple(others[:number]), tasks=("niah_single",))
        values: dict[Arm, list[float | None]] = {FIRST: list(zero), **{other: list(zero) for other in others[:number]}}
        values[others[0]] = list(one)
        found = decided(statement, rows_of(statement, values, 10), 10)
        assert found.holds is holds, found.figures["gains"]


def test_less_is_better_of_kl() -> None:
    low, high = [0.01 + i / 1000 for i in range(12)], [0.5 + i / 1000 for i in range(12)]
    found = judge(low, high, figure="kl")
    assert found.holds is True
    assert "Gain (95 %): +0.490 (+0.490 to +0.490) over SnapKV at 40%, kernel=1, n = 12" in found.measured
    assert "12 passages of 1,024 tokens" in found.measured
    assert judge(high, low, figure="kl").holds is False
    assert judge(high, low, figure="kl", verdict="as good").holds is False


@pytest.mark.parametrize(
    ("mean", "spread", "n", "holds"),
    [(0.7, 0.01, 12, True), (0.3, 0.01, 12, False), (0.7, 0.2, 12, None), (0.7, 0, 8, None)],
)
def test_a_figure_lies_within_the_papers_range(mean: float, spread: float, n: int, holds: bool | None) -> None:
    statement = Statement(
        "S", "says", FIRST, verdict="within", figure="reused_share", tasks=("niah_single",), bounds=(0.65, 0.75)
    )
    values: dict[Arm, list[float | None]] = {FIRST: [mean + spread * (-1) ** index for index in range(n)]}
    claim = decided(statement, rows_of(statement, values, n), n)
    assert claim.holds is holds
    assert bool(claim.reason) == (holds is not True)
    assert claim.figures["bounds"] == (0.65, 0.75)
    assert claim.figures["gains"] == []


def test_prompts_that_one_arm_cannot_hold_are_no_pairs() -> None:
    found = judge([None] * 5 + [1.0] * 10, [0.0] * 15)
    assert found.holds is True
    assert found.figures["gains"][0]["n"] == 10
    assert found.figures["arms"][0]["infeasible"] == [0.5] * 5
    assert found.figures["arms"][0]["values"] == [None] * 5 + [1.0] * 10
    none = judge([None] * 12, [0.0] * 12)
    assert none.holds is None
    assert "needs 50%" in none.measured
    assert re.findall(r"\b\d+\b(?!%)", none.reason) == ["0", "1", "10"], "pairs, the kernel, the pairs needed"
    json.dumps(written(none), allow_nan=False)


def test_what_cannot_be_run_on_the_model_is_said() -> None:
    refusal = "No map of heads."
    statement = Statement("S", "says", FIRST, (OTHER,), tasks=("niah_single",))
    rows = rows_of(statement, {FIRST: [1.0] * 12, OTHER: [None] * 12}, 12)
    rows |= {at: {"refused": refusal} for at in rows if at[0] == OTHER}
    found = decided(statement, rows, 12, "other")
    assert found.holds is None
    assert "kernel=1 could not" in found.measured
    assert found.reason.endswith(f" {refusal}")


def test_one_of_several_others_decides() -> None:
    third = arm("random", "40%")
    statement = Statement("S", "says", FIRST, (OTHER, third), tasks=("niah_single",))
    values: dict[Arm, list[float | None]] = {FIRST: [1.0] * 12, OTHER: [0.0] * 12, third: [1.0] * 12}
    found = decided(statement, rows_of(statement, values, 12), 12)
    assert (found.holds, "Random eviction at 40%" in found.reason) == (None, True)
    assert "told apart" in found.reason
    values |= {FIRST: [0.0] * 12}
    found = decided(statement, rows_of(statement, values, 12), 12)
    assert (found.holds, "Random eviction at 40%" in found.reason) == (False, True)
    assert "worse" in found.reason


def test_the_toy_is_not_asked_of_prose() -> None:
    assert set(claiming("demo")) == {"sekv", "chess", "freekv", "sentkv", "compresskv"}
    with raises_code("model_is_toy", method="quest"):
        refuse_others(["freekv", "quest"], "demo")
    with raises_code("no_claims", method="random"):
        refuse_others(["random"], "smollm2")


TEXT = Statement("S", "t", arm("streaming_llm", "40%"), (arm("full"),), "as good", figure="kl", text=(96, 64))
NEEDLE = Statement(
    "S",
    "n",
    arm("keydiff", "60%"),
    (arm("random", "60%", window=0),),
    figure="coverage",
    tasks=("niah_single",),
    question="after",
)


def measured(runs: Path, said: list[str], prompts: int = 1, **more: Any) -> Rows:
    statements = [(TEXT, prompts), (NEEDLE, prompts)]
    return armstudy.measure_arms(statements, "demo", "cpu", 60.0, runs, said.append, **more)


def test_arms_of_statements_are_a_study_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt of each kind, short ones; each arm is run on the prompts of its statements alone, a second call runs
    what more prompts ask for, and the figures are those of the engine itself."""
    monkeypatch.setattr(armstudy, "LENGTH", 256)
    said: list[str] = []
    rows = measured(tmp_path, said)
    at: list[Place] = [("text 96+64", "in", 0), ("niah_single", "after", 0)]
    assert set(rows) == {
        (one, place) for statement, place in zip((TEXT, NEEDLE), at, strict=True) for one in statement.arms
    }
    assert len(said) == 4
    assert rows[arm("full"), at[0]]["kl"] == pytest.approx(0, abs=1e-9)
    assert rows[arm("streaming_llm", "40%"), at[0]]["kl"] > 0
    seen = rows[arm("keydiff", "60%"), at[1]]
    assert 0 < seen["coverage"] < 1
    assert seen["passed"]
    assert rows[arm("random", "60%", window=0), at[1]]["overrides"]["window"] == 0
    (study,) = storage.ids(tmp_path)
    results = Results.read(tmp_path, study)
    assert (results.planned, results.ended, len(results.arms), len(results.prompts)) == (4, 4, 4, 2)
    assert measured(tmp_path, said) == rows
    assert len(said) == 4
    assert measured(tmp_path, said, 2).items() >= rows.items()
    assert (len(said), Results.read(tmp_path, study).planned) == (8, 8)


def test_a_claims_trial_is_the_trial_of_the_engine(demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study's figures equal, digit for digit, those of `carry_out` and of a passage that is fed, which the published
    claims were measured with."""
    monkeypatch.setattr(armstudy, "LENGTH", 256)
    rows = measured(tmp_path, [])
    engine = Engine(demo)
    request = FreeTextRequest(
        model="demo", methods=("streaming_llm",), first_seed=armstudy.FIRST_SEED, length=96, tokens=64
    )
    passages = Passages(request, engine)
    passages.turn(0)
    text = passages.run("streaming_llm", "40%")
    names = ("kl", "coverage", "resident_share", "read_share", "passed", "preset")
    assert {name: rows[TEXT.first, ("text 96+64", "in", 0)][name] for name in names} == {
        name: text[name] for name in names
    }
    trial = Trial("niah_single", 256, DEPTHS[0], armstudy.FIRST_SEED, 0, "random", "60%", "after")
    prompts = Prompts(engine, armstudy.FIRST_SEED, ["keydiff", "random"])
    row = carry_out(engine, prompts, trial, {"window": 0}, armstudy.ANSWER)
    shared = ("output", "exact", "moved_share", "cold_share", "steps", "overrides")
    found = rows[NEEDLE.others[0], ("niah_single", "after", 0)]
    assert {name: found[name] for name in (*names[1:], *shared)} == {name: row[name] for name in (*names[1:], *shared)}


def test_other_code_makes_a_claims_trial_stale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(armstudy, "LENGTH", 256)
    said: list[str] = []
    measured(tmp_path, said)
    monkeypatch.setattr(tablestudy, "origin", lambda model, name, *more: f"{name}-other")
    measured(tmp_path, said)
    assert next(line for line in said if "kept trials" in line).split()[0] == "4"
    assert len(said) == 9


def test_a_stopped_paper_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two papers, that whose trials have all ended is judged."""
    monkeypatch.setattr(armstudy, "LENGTH", 256)
    said: list[str] = []
    rows = measured(tmp_path, said, cancelled=lambda: len(said) >= 2)
    assert len(rows) == 2
    plans = {"streaming_llm": [Plan(TEXT, 1, 1, 0.025)], "keydiff": [Plan(NEEDLE, 1, 1, 0.025)]}
    whole = {
        name: all((one, place) in rows for one in statement.arms for place in places(statement, 1))
        for name, statement in (("streaming_llm", TEXT), ("keydiff", NEEDLE))
    }
    judged = [name for name, _ in check.check("demo", plans, rows, lambda: None, 1, said.append)]  # type: ignore
    assert judged == [name for name, ended in whole.items() if ended]
    assert len(judged) == 1


def test_a_passage_is_read_and_fed_as_the_tokens_it_was_drawn_as(smollm2: Any) -> None:
    """Texts of a study keep to the tokens that published claims were measured on."""
    for context, fed in (SHORT, LONG):
        for index in (0, 1, 2):
            prompt = armstudy.make_prompt("smollm2", f"text {context}+{fed}", index)
            read, forced = tokens_of(prompt, RunRequest(model="smollm2"), smollm2.tokenizer)
            whole = passage(armstudy.FIRST_SEED + index, context, fed, smollm2.tokenizer, smollm2.max_positions)
            assert (read.ids, forced) == (whole[0].ids, whole[1])


def test_passages_share_no_text(smollm2: Any) -> None:
    places = [0]
    for sentence in sentences():
        places.append(places[-1] + len(sentence) + 1)
    found = apart(armstudy.FIRST_SEED, 15, 1088)
    starts = sorted(places[begins(armstudy.FIRST_SEED + index)] for index in found)
    assert all(after - before >= 6 * 1088 for before, after in pairwise(starts))
    assert starts[0] + places[-1] - starts[-1] >= 6 * 1088
    assert found[:10] == apart(armstudy.FIRST_SEED, 10, 1088), "more passages begin with the same"
    for index in found:
        context, fed = passage(armstudy.FIRST_SEED + index, 1024, 64, smollm2.tokenizer, smollm2.max_positions)
        assert len(smollm2.tokenizer.decode([*context.ids, *fed])) < 6 * 1088, "or the next one might begin in it"
    with pytest.raises(ValueError, match="has no 60 passages of 1,088 tokens apart"):
        apart(armstudy.FIRST_SEED, 60, 1088)


def test_what_a_paper_says_makes_no_trial_stale(tmp_path: Path) -> None:
    """Only what runs decides what is comparable."""
    source = Path(__file__).parent.parent / "plugin" / "small_norms.py"
    text = source.read_text(encoding="utf-8")
    assert text.count('"50%"') == text.count("param(16") == 1
    changed_words, changed_code = tmp_path / "a.py", tmp_path / "b.py"
    changed_words.write_text(text.replace('"50%"', '"40%"'), encoding="utf-8")
    changed_code.write_text(text.replace("param(16", "param(8"), encoding="utf-8")
    assert running(changed_words) == running(source)
    assert running(changed_code) != running(source)
    assert b"Statement" not in running(source)


def test_the_page_counts_and_says_all(tmp_path: Path) -> None:
    found = judge([1.0] * 12, [0.0] * 12)
    about = {"date": "2026-01-01", "machine": {"processor": "P", "cores": 2}, "torch": "2", "prompts": 12}
    text = page.document({"methods": {"snapkv": {"about": about, "claims": [written(found)]}}}, "smollm2")
    assert "| [SnapKV](#snapkv) | 1 | 1 | 0 | 0 |\n| all | 1 | 1 | 0 | 0 |" in text
    assert "- **S: says.** It holds. Exact match: SnapKV at 40% 1.00" in text


def test_a_page_needs_its_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        kvlens("bench", "claims", "--doc", str(tmp_path / "claims.md"))
    assert {"--doc", "--out."} <= set(capsys.readouterr().err.split())


def test_claims_are_written_method_by_method(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one method came to is on the disk when another one fails; others in the file are kept, and the page has
    them all."""
    made = judge([1.0] * 12, [0.0] * 12)

    def one_then_none(model: str, plans: Any, *_: Any) -> Any:
        yield next(iter(plans)), [made]
        raise ValueError("the second failed.")

    out, doc = tmp_path / "claims.json", tmp_path / "claims.md"
    monkeypatch.setattr(check, "check", one_then_none)
    argv = ("bench", "claims", "--model", "demo", "--out", str(out), "--runs", str(tmp_path), "--doc", str(doc))
    with pytest.raises(SystemExit):
        kvlens(*argv, "--methods", "freekv,sekv")
    assert "the second failed." in capsys.readouterr().err
    assert list(json.loads(out.read_text())["methods"]) == ["freekv"]
    monkeypatch.setattr(check, "check", lambda model, plans, *_: iter([(next(iter(plans)), [made])]))
    kvlens(*argv, "--methods", "chess")
    assert "[holds] S: says" in capsys.readouterr().out
    assert list(json.loads(out.read_text())["methods"]) == ["freekv", "chess"]
    assert "| [FreeKV](#freekv) | 1 | 1 | 0 | 0 |" in doc.read_text()
