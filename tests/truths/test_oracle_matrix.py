"""Every registered method: what is recorded of full attention beside its own, against what is known of it otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import ListSink, Prompts, makes, preset_of, run, share_of

from kvlens import methods
from kvlens.records import StepRecord

NAMES = makes()
NEW = 16
ORACLE_CHECK = "full attention adds up to 1"
WHOLE_SPANS = ("chess", "freekv")
"""methods that attend each span wholly and exactly, or not at all"""


def record(demo: Any, prompts: Prompts, name: str, **options: Any) -> tuple[Any, ListSink]:
    prompt, sink = prompts.task("multikey", 700), ListSink()
    settings = {"budget": share_of(name, "0.25"), "preset": preset_of(name), "read": prompts.read(prompt, name)}
    settings |= {"max_new": NEW, "ignore_eos": True, "coverage": True, "keep_logits": True}
    return run(demo, prompt, name, sink=sink, **settings, **options), sink


class Recorded:
    """Per method, made when first asked for: (result, sink)."""

    def __init__(self, demo: Any, prompts: Prompts) -> None:
        self._demo, self._prompts = demo, prompts
        self._made: dict[str, tuple[Any, ListSink]] = {}

    def __getitem__(self, name: str) -> tuple[Any, ListSink]:
        if name not in self._made:
            self._made[name] = record(self._demo, self._prompts, name)
        return self._made[name]


@pytest.fixture(scope="module")
def recorded(demo: Any, prompts: Prompts) -> Recorded:
    return Recorded(demo, prompts)


def regrets(steps: list[StepRecord]) -> np.ndarray:
    return np.stack([step.head["regret"] for step in steps])


@pytest.mark.parametrize("name", NAMES)
def test_full_attention_adds_up_and_is_what_coverage_saw(recorded: Recorded, name: str) -> None:
    result, sink = recorded[name]
    assert [check.passed for check in result.checks if check.name == ORACLE_CHECK] == [True]
    assert all(check.passed for check in result.checks)
    method = methods.get(name)
    turns = method.turns_keys(methods.make_parameters(method, "demo" if "demo" in method.presets else None, {}))
    for step in sink.steps:
        assert step.oracle is not None
        np.testing.assert_allclose(step.oracle.full.sum(-1) + step.oracle.tail_full, 1, atol=1e-3)
        listed = np.maximum(step.oracle.full - step.oracle.mass, 0).sum(-1)
        assert (step.head["regret"] >= listed - 1e-5).all()
        assert (step.head["regret"] <= listed + step.oracle.tail_full + 1e-5).all()
        if not turns and not any(
            step.head[f"mass_{role}"].any() for role in ("coarse", "reconstructed", "mean", "quantised")
        ):
            # what is kept exactly only gains from what is not: all that full attention lost on a span was not covered
            assert (step.head["regret"] <= 1 - step.head["coverage"] + 1e-4).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_listed_masses_are_the_methods_own(recorded: Recorded, name: str) -> None:
    _, sink = recorded[name]
    for step in sink.steps:
        oracle = step.oracle
        assert oracle is not None
        for layer, head in np.ndindex(step.tail_mass.shape):
            own = dict(zip(step.top_span[layer, head].tolist(), step.top_mass[layer, head].tolist(), strict=True))
            least = step.top_mass[layer, head].min()
            for span, mass in zip(oracle.span[layer, head].tolist(), oracle.mass[layer, head].tolist(), strict=True):
                if span in own:
                    assert mass == own[span]
                else:
                    assert mass <= least


def test_full_kv_has_nothing_to_regret(recorded: Recorded) -> None:
    _, sink = recorded["full"]
    assert regrets(sink.steps).max() < 1e-5
    for step in sink.steps:
        assert step.oracle is not None
        np.testing.assert_allclose(step.oracle.full, step.oracle.mass, atol=1e-6)


@pytest.mark.parametrize("name", WHOLE_SPANS)
def test_of_whole_spans_regret_is_what_coverage_lacks(recorded: Recorded, name: str) -> None:
    _, sink = recorded[name]
    lacking = 1 - np.stack([step.head["coverage"] for step in sink.steps])
    assert lacking.max() > 0.5, "nothing was dropped, so this would show nothing"
    np.testing.assert_allclose(regrets(sink.steps), lacking, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_span_keys_are_those_of_the_prompts_spans(recorded: Recorded, demo: Any, name: str) -> None:
    _, sink = recorded[name]
    assert sink.prefilled is not None
    keys = sink.prefilled.span_keys
    assert keys is not None
    n = len(sink.prefilled.tokens) - 1
    assert keys.form == "pre-rope"
    assert keys.span.tolist() == [span.span for span in sink.prefilled.spans if span.tok_start < min(span.tok_end, n)]
    assert keys.keys.shape == (demo.shape.layers, demo.shape.kv_heads, len(keys.span), demo.shape.head_dim)
    assert np.isfinite(keys.keys).all()


@pytest.mark.parametrize("name", ["sekv", "streaming_llm"])
def test_a_sample_is_a_part_of_the_whole_and_changes_nothing(
    recorded: Recorded, demo: Any, prompts: Prompts, name: str
) -> None:
    whole, every = recorded[name]
    sampled, some = record(demo, prompts, name, oracle="every=3,layers=1+4-5")
    off, none = record(demo, prompts, name, oracle="off")
    assert whole.ids == sampled.ids == off.ids
    for a, b, c in zip(whole.logits, sampled.logits, off.logits, strict=True):
        assert (a == b).all()
        assert (a == c).all()
    assert all(step.oracle is None and "regret" not in step.head and "coverage" in step.head for step in none.steps)
    assert ORACLE_CHECK not in {check.name for check in off.checks}
    layers, others = [1, 4, 5], [0, 2, 3]
    for a, b in zip(every.steps, some.steps, strict=True):
        if b.step % 3:
            assert b.oracle is None
            assert "regret" not in b.head
            continue
        assert a.oracle is not None
        assert b.oracle is not None
        assert np.isnan(b.head["regret"][others]).all()
        assert np.isnan(b.oracle.tail_full[others]).all()
        assert (b.oracle.span[others] == -1).all()
        np.testing.assert_allclose(b.head["regret"][layers], a.head["regret"][layers], atol=1e-6)
        np.testing.assert_allclose(b.oracle.full[layers], a.oracle.full[layers], atol=1e-6)
