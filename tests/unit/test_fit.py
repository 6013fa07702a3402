"""The preset `fit`: what it comes to, when it is taken, what is said of it; what is refused before a model loads."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import SAVES_LITTLE, raises_code

from kvlens import methods
from kvlens.budget import Budget, BudgetInfeasible, percent_up
from kvlens.cli.main import app
from kvlens.demo.encode import demo_encode
from kvlens.demo.tasks import make_prompt
from kvlens.lab.bench.sweep import SweepRequest, sweep
from kvlens.lab.bench.trials import missing
from kvlens.methods import FIT
from kvlens.methods.advice import refusal, smallest_budget
from kvlens.methods.chess.trigger import SHIPPED
from kvlens.methods.fitting import MARGIN, Sizes, choose, fitted, parts_as_run, rule_of
from kvlens.runs import preparing
from kvlens.runs.carrying import carry_out
from kvlens.runs.preflight import estimate
from kvlens.runs.repeat import read_run
from kvlens.runs.repeatpair import pair
from kvlens.runs.request import RunRequest, default_budget, default_preset
from kvlens.runs.usualfit import NEW, POINTS, fits
from kvlens.shape import KVShape
from kvlens.store.reader import TraceReader
from kvlens.text.prompts import PromptText

SHAPES = {"demo": KVShape(6, 8, 2, 32, 4), "smollm2": KVShape(30, 9, 3, 64, 4)}
EVERY = list(methods.registry())


PARIS = "Paris is the capital of France. " * 12


def sizes_at(model: str, tokens: int, share: str, name: str) -> Sizes:
    budget = default_budget(name) if methods.get(name).keeps_all else share
    return Sizes(SHAPES[model], tokens - 1, NEW, Budget.parse(budget).bytes(SHAPES[model], tokens + NEW))


def tight(needs_about: int = 20) -> Sizes:
    """900 tokens of the real model's shape at a share of full KV."""
    shape = SHAPES["smollm2"]
    return Sizes(shape, 899, NEW, shape.full_kv_bytes(900 + NEW) * needs_about // 100)


@pytest.mark.parametrize("model", list(SHAPES))
@pytest.mark.parametrize("name", EVERY)
def test_every_method_runs_by_itself(name: str, model: str) -> None:
    """At 20 % of 1,024 tokens and 10 % of 4,096, with nothing set; a method that keeps all has no limit."""
    method = methods.get(name)
    for tokens, share in POINTS:
        sizes = sizes_at(model, tokens, share, name)
        for preset in (None, FIT):
            found = choose(method, preset, default_preset(name, model), {}, sizes)
            room = sizes.budget_bytes
            if room is not None and method.family == "quantisation" and found.floor > room:
                # every token at two bits and its scales is what there is: no parameter makes it smaller
                least = smallest_budget(method, preset, default_preset(name, model), {}, sizes)
                said = refusal(method, preset, default_preset(name, model), found, {}, sizes)
                assert found.preset == FIT
                assert share == "10%" or name in SAVES_LITTLE
                assert least is not None
                assert not sizes.may_hold(method, found.params)
                assert f"--budget to {float(percent_up(least / sizes.full_kv_bytes)):.1%}" in str(said)
                continue
            if room is not None:
                assert found.floor <= room * (1 if method.floor_is_exact else MARGIN)
            assert sizes.may_hold(method, found.params)
            assert (found.preset == FIT) == (found.said is not None)
    assert len(rule_of(method)) > 40


@given(
    st.sampled_from(EVERY),
    st.integers(1, 40),
    st.sampled_from([(8, 2), (9, 3), (4, 4), (32, 8)]),
    st.sampled_from([16, 32, 64, 128]),
    st.integers(2, 9000),
    st.integers(1, 300),
    st.none() | st.floats(0.005, 0.99),
)
@settings(deadline=None, max_examples=60)
def test_a_rule_gives_parameters_whatever_the_sizes(
    name: str, layers: int, heads: tuple[int, int], dim: int, tokens: int, new: int, share: float | None
) -> None:
    shape, method = KVShape(layers, *heads, dim, 2), methods.get(name)
    limit = None if share is None else int(share * shape.full_kv_bytes(tokens + 1 + new))
    sizes = Sizes(shape, tokens, new, limit)
    params = methods.make_parameters(method, FIT, fitted(method, sizes))
    assert method.bound_bytes(params, *sizes.run(method)) <= sizes.floor(method, params)


def test_the_papers_numbers_are_run_where_they_fit() -> None:
    roomy = dataclasses.replace(tight(), prompt_tokens=30_000, budget_bytes=SHAPES["smollm2"].full_kv_bytes(10_000))
    found = choose(methods.get("freekv"), None, "paper", {}, roomy)
    assert (found.preset, found.said, found.fitted) == ("paper", None, {})
    assert found.params.tokens == 2048


def test_what_a_larger_budget_asks_for_counts() -> None:
    """SeKV keeps more anchors under a larger budget, and each cuts a span in two: at 20 % of 4,096 tokens its paper's
    numbers would fit without anchors and do not with them."""
    sekv, shape = methods.get("sekv"), SHAPES["smollm2"]
    sizes = Sizes(shape, 4095, 64, shape.full_kv_bytes(4096 + 64) // 5)
    params = methods.make_parameters(sekv, "paper", {})
    assert sekv.floor_bytes(params, *sizes.run(sekv)) < sizes.budget_bytes < sizes.floor(sekv, params)
    assert choose(sekv, None, "paper", {}, sizes).preset == FIT


def test_fit_is_run_where_they_do_not_and_says_why() -> None:
    found = choose(methods.get("sekv"), None, "paper", {"sinks": 2}, tight())
    assert found.preset == FIT
    assert found.said is not None
    assert re.findall(r"[\d.]+%", found.said)[1] == "20.0%"
    assert "the budget is 20.0%; running preset fit: " in found.said
    assert "window 24" in found.said
    assert "sinks 2" in found.said
    assert (found.params.sinks, found.params.window, found.fitted["window"]) == (2, 24, 24)
    misfit = choose(methods.get("quest"), None, "paper", {}, dataclasses.replace(tight(), budget_bytes=None))
    assert misfit.said is not None
    numbers = "The paper's numbers do not fit this prompt (it is 900 tokens, all attended, since up to 1,024 are)"
    assert misfit.said.startswith(f"{numbers}; running preset fit: ")


def test_where_fit_does_not_fit_either_that_is_said() -> None:
    """Of three tokens nothing can be left out, whatever the numbers."""
    few = dataclasses.replace(tight(), prompt_tokens=2, budget_bytes=None)
    for name, both in {
        "quest": (
            "it is 3 tokens, all attended, since up to 1,024 are",
            "it is 3 tokens, all attended, since up to 48 are",
        ),
        "sparq": (
            "it is 3 tokens, all attended, since up to 128 are besides a step's own",
            "it is 3 tokens, all attended, since up to 16 are besides a step's own",
        ),
        "chess": ("it is 1 page, one grid",) * 2,
    }.items():
        found = choose(methods.get(name), None, "paper", {}, few)
        paper, fit = both
        assert found.said is not None
        why, _, rest = found.said.partition("; running preset fit")
        told, _, numbers = rest.partition(f"({fit}): ")
        assert f"({paper})" in why
        assert "not" in told
        assert numbers.endswith(".")
    for tokens, stays in ((1023, False), (1024, True)):
        found = choose(methods.get("quest"), None, "paper", {}, dataclasses.replace(few, prompt_tokens=tokens))
        assert (found.preset == "paper") == stays, "of 1,025 tokens a page is left out"


@pytest.mark.parametrize(
    ("name", "parameter", "at"),
    [
        ("quest", "tokens", {1023: 112, 1024: 128, 1025: 128, 4096: 512, 8192: 1024, 16_384: 1024}),
        ("sparq", "tokens", {1023: 127, 1024: 128, 256: 32}),
        ("rocketkv", "attended", {1024: 128, 1023: 127, 4096: 512, 8192: 512}),
        ("kivi", "residual", {256: 32, 512: 64, 511: 32, 1024: 128}),
        ("infinigen", "window", {1599: 16, 3199: 16, 3200: 32}),
    ],
)
def test_a_part_of_the_prompt_is_a_part_of_all_its_tokens(name: str, parameter: str, at: dict[int, int]) -> None:
    """Prefill covers one token fewer, which a rule that rounds down must not feel at round lengths."""
    for tokens, value in at.items():
        sizes = Sizes(SHAPES["smollm2"], tokens - 1, NEW, None)
        assert fitted(methods.get(name), sizes)[parameter] == value, tokens


def test_the_table_of_methods_shows_what_a_run_of_that_prompt_gets(source: PromptText, tmp_path: Path) -> None:
    for point in fits("demo", "quest"):
        sizes = sizes_at("demo", point["tokens"], "20%", "quest")
        assert point["fit"] == fitted(methods.get("quest"), sizes)
    request = RunRequest(model="demo", method="quest", preset=FIT, max_new=4, coverage=False, ignore_eos=True)
    uid, _ = carried(request, source, tmp_path)
    with TraceReader.open(tmp_path, uid) as reader:
        meta = reader.meta
    assert meta.prompt_tokens is not None
    sizes = Sizes(SHAPES["demo"], meta.prompt_tokens - 1, 4, None)
    assert meta.config["tokens"] == fitted(methods.get("quest"), sizes)["tokens"]


def test_a_named_preset_stays_and_the_smaller_need_is_taken_where_none_fits() -> None:
    sekv = methods.get("sekv")
    assert choose(sekv, "paper", "paper", {}, tight()).preset == "paper"
    nothing = choose(sekv, None, "demo", {}, tight(3))
    assert nothing.floor == min(nothing.floor, choose(sekv, FIT, "demo", {}, tight(3)).floor)
    with raises_code("unknown_preset", preset="x"):
        methods.make_parameters(sekv, "x", {})


def test_what_is_given_goes_before_the_rule_and_may_contradict_the_paper() -> None:
    """l_max=30 cannot go with the paper's l_min of 16, and is no reason to refuse `fit`."""
    given = {"l_max": 30, "l_min": 10}
    assert choose(methods.get("sekv"), FIT, "paper", given, tight()).params.l_max == 30
    with pytest.raises(ValueError, match=r"l_max .* 2 \* l_min"):
        choose(methods.get("sekv"), None, "paper", {"l_max": 30}, tight())


def test_a_refusal_names_what_works() -> None:
    def said(name: str, preset: str | None, sizes: Sizes) -> str:
        method = methods.get(name)
        usual = "paper" if "paper" in method.presets else None
        return str(refusal(method, preset, usual, choose(method, preset, usual, {}, sizes), {}, sizes))

    assert "fit, or raise --budget to 100% (" in said("freekv", "paper", tight())
    assert "% (" not in said("sekv", "paper", tight()).partition("fit, or raise --budget to ")[2]
    all_kept = said("quest", None, tight())
    assert "and saves reading: leave out --budget, and --set keep=0.2 lets it" in all_kept
    assert said("full", None, tight()).endswith("saves reading: leave out --budget.")
    freekv = methods.get("freekv")
    smallest = smallest_budget(freekv, None, "paper", {}, tight())
    assert smallest is not None
    assert f"needs at least {smallest:,} bytes" in said("freekv", None, tight(3))
    held = dataclasses.replace(tight(), budget_bytes=smallest)
    chosen = choose(freekv, None, "paper", {}, held)
    assert chosen.floor <= smallest
    assert held.may_hold(freekv, chosen.params)


@pytest.mark.parametrize("name", EVERY)
def test_the_budget_that_a_refusal_names_is_enough(name: str) -> None:
    """For a prompt of 50 tokens and of 900, from a budget that nothing fits: by arithmetic it is held there, and a
    thousandth of full KV below it is not."""
    method, usual, shape = methods.get(name), default_preset(name, "smollm2"), SHAPES["smollm2"]
    for tokens, share in ((50, 0.01), (50, 0.2), (900, 0.01)):
        full = shape.full_kv_bytes(tokens + NEW)
        sizes = Sizes(shape, tokens - 1, NEW, int(share * full))
        choice = choose(method, None, usual, {}, sizes)
        if sizes.may_hold(method, choice.params) or method.keeps_all:
            continue
        said = refusal(method, None, usual, choice, {}, sizes)
        enough = float(said.would_do["budget"])
        assert f"raise --budget to {100 * enough:g}%" in str(said)
        if enough == 1:
            continue
        at = dataclasses.replace(sizes, budget_bytes=int(enough * full))
        assert choose(method, None, usual, {}, at).floor <= int(enough * full)
        below = dataclasses.replace(sizes, budget_bytes=int((enough - 0.0011) * full))
        assert choose(method, None, usual, {}, below).floor > int((enough - 0.0011) * full)


# ------------------------------------------------------------------------------------------------------------- runs
@pytest.fixture(scope="module")
def source() -> PromptText:
    made = make_prompt("needle", 512, 0.5, 7, demo_encode())
    return PromptText(made.text, made.answer, made.needle, made.task)


def carried(request: RunRequest, source: PromptText, folder: Path) -> tuple[str, list[str]]:
    lines: list[str] = []
    uid, status, _ = carry_out(request, source, folder, lambda *_: None, lambda: False, lines.append)
    assert status == "completed"
    return uid, lines


@pytest.mark.parametrize("name", ["sekv", "freekv", "sentkv", "snapkv", "quest", "chess", "compresskv"])
def test_a_run_of_fit_keeps_its_budget_and_says_so(source: PromptText, tmp_path: Path, name: str) -> None:
    budget = None if methods.get(name).keeps_all else "0.3"
    request = RunRequest(model="demo", method=name, preset=FIT, budget=budget, max_new=6, coverage=False)
    uid, lines = carried(request, source, tmp_path)
    with TraceReader.open(tmp_path, uid) as reader:
        meta = reader.meta
        assert (meta.preset, meta.fit) == (FIT, lines[0])
        assert all(reader.self_checks()["passed"])
        if meta.budget_bytes is not None:
            assert reader.steps()["peak_bytes"].max() <= meta.budget_bytes
    assert lines[0].endswith(".")
    assert "unning preset fit: " in lines[0]


def test_a_fitted_run_is_repeated_as_it_was(source: PromptText, tmp_path: Path) -> None:
    request = RunRequest(model="demo", method="freekv", budget="0.15", max_new=6, coverage=False)
    uid, lines = carried(request, source, tmp_path)
    assert " demo " in lines[0]
    stored, _ = pair(tmp_path, uid, False, lambda *_: None, lambda: False)
    with TraceReader.open(tmp_path, uid) as first, TraceReader.open(tmp_path, stored.uid) as again:
        assert (again.meta.preset, again.meta.config) == (FIT, first.meta.config)
    assert read_run(tmp_path, uid).request.preset == FIT


def test_arithmetic_refuses_before_the_model_loads(
    source: PromptText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(preparing, "prepare", loaded)
    monkeypatch.setattr("kvlens.runs.carrying.prepare", loaded)
    for change, words in {
        ("sekv", "paper", "0.4"): "run with --preset fit",
        ("freekv", "paper", "0.2"): "run with --preset fit",
        ("streaming_llm", None, "1tok"): "raise --budget to",
        ("quest", None, "64tok"): "leave out --budget",
    }.items():
        name, preset, budget = change
        with pytest.raises(BudgetInfeasible, match=words):
            carry_out(
                RunRequest(model="demo", method=name, preset=preset, budget=budget),
                source,
                tmp_path,
                lambda *_: None,
                lambda: False,
            )
    with pytest.raises(ValueError, match="shorten the prompt"):
        carry_out(
            RunRequest(model="demo", method="full", max_new=9000), source, tmp_path, lambda *_: None, lambda: False
        )
    assert not any(tmp_path.iterdir())


def test_the_estimate_says_preset_values_and_what_would_work(source: PromptText) -> None:
    found = estimate(source, "demo", "freekv", {}, "0.15", 6)
    assert found["preset"] == FIT
    assert found["feasible"] is True
    assert found["values"]["sinks"] >= 4
    assert found["instead"] is None
    stays = estimate(source, "demo", "freekv", {}, "0.15", 6, "paper")
    assert (stays["feasible"], stays["instead"]) == (False, {"preset": FIT})
    assert "run with --preset fit" in stays["warnings"][0]
    less = estimate(source, "demo", "freekv", {}, "0.02", 6, "paper")["instead"]
    assert less["preset"] == FIT
    assert estimate(source, "demo", "freekv", {}, less["budget"], 6, FIT)["feasible"] is True
    assert estimate(source, "demo", "quest", {}, "64tok", 6)["instead"] == {"budget": "auto"}


@pytest.mark.parametrize("name", ["sekv", "sentkv", "infinigen", "razorattention", "freekv", "snapkv"])
def test_an_estimate_names_one_budget_that_works(name: str) -> None:
    """In its figures, its sentence and its button alike."""
    for share in ("1%", "5%"):
        found = estimate(PARIS, "demo", name, {}, share, 64)
        assert found["feasible"] is not True
        enough = found["instead"]["budget"]
        assert percent_up(found["min_budget_bytes"] / found["full_kv_bytes"]) == enough
        (warning,) = found["warnings"]
        if found["feasible"] is None:
            assert f"needs, by estimate, {found['min_budget_bytes'] / found['full_kv_bytes']:.1%} of" in warning
        else:
            assert f"raise --budget to {100 * float(enough):g}%" in warning
        assert estimate(PARIS, "demo", name, {}, enough, 64)["feasible"] is True


def test_methods_shows_fit_beside_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    points = fits("demo", "sekv")
    assert [(point["tokens"], point["budget"], point["preset"]) for point in points] == [
        (1024, "20%", "demo"),
        (4096, "10%", "demo"),
    ]
    app(["methods", "sekv", "--model", "demo"], standalone_mode=False)
    said = capsys.readouterr().out
    assert "paper's preset" in said
    assert "fit, 1,024 at 20%" in said
    assert "preset fit: The window is" in said


# ---------------------------------------------------------------------------------------------------- figures that lack
def test_what_is_missing_is_said_before_a_sweep_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert missing("demo", ("chess", "snapkv")) == []
    assert missing("smollm2", ("chess", "compresskv")) == [], "shipped for the real model too"
    monkeypatch.delitem(SHIPPED, "demo")
    (said,) = missing("demo", ("chess", "snapkv"))
    assert "kvlens calibrate chess --model demo --out FILE" in said
    assert "other methods run" in said
    request = SweepRequest(
        model="demo",
        methods=("chess", "streaming_llm"),
        tasks=("needle",),
        budgets=("20%",),
        lengths=(256,),
        depths=(0.5,),
        prompts=1,
        traces=False,
        device="cpu",
    )
    lines: list[str] = []
    _, rows = sweep(request, tmp_path, lambda *_: None, say=lines.append)
    assert lines == [said]
    by_method = {row["method"]: row for row in rows}
    assert "kvlens calibrate chess" in by_method["chess"]["refused"]
    assert by_method["streaming_llm"]["steps"] > 0


def test_fit_takes_the_trained_parts_of_the_models_own_preset() -> None:
    method = methods.get("sekv")
    usual = default_preset("sekv", "smollm2")
    for preset in (None, FIT):
        found = choose(method, preset, usual, {}, tight())
        assert (found.preset, found.params.router, found.fitted["router"]) == (FIT, "trained", "trained")
        assert choose(method, preset, usual, {"router": "pca"}, tight()).params.router == "pca"
        assert choose(method, preset, default_preset("sekv", "another"), {}, tight()).params.router == "pca"
    assert parts_as_run(method, usual, {"router": "pca", "window": 8}) == {"router": "pca"}
    assert parts_as_run(method, "paper", {"router": "pca"}) == {}
