"""Full attention of lost steps is recorded however few steps a long context lets be recorded, and its effects too."""

from __future__ import annotations

from pathlib import Path

import pytest
import support

from kvlens.engine import effect
from kvlens.engine.models import load
from kvlens.lens.verdict import verdict
from kvlens.metaparts import Sampled
from kvlens.recording import sampling
from kvlens.recording.sampling import MOST_LOST, OracleSampling, words
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.shape import KVShape
from kvlens.store.reader import TraceReader


@pytest.mark.parametrize("step", range(7))
def test_a_lost_step_is_recorded_as_the_chosen_ones_are(step: int) -> None:
    found = OracleSampling(3, (1, 2), losses=True)
    assert found.choose_layers(step, 1) == (1, 2)
    assert found.choose_layers(step, 0) == ((1, 2) if step % 3 == 0 else ())
    assert found.choose_layers(step, MOST_LOST + 1) == found.choose_layers(step, 0)
    assert OracleSampling(3, (1, 2)).choose_layers(step, 1) == found.choose_layers(step, 0), (
        "not where the steps were asked for by number"
    )


def test_a_meta_says_that_lost_steps_are_recorded() -> None:
    assert words(Sampled(every=4, losses=True), 6) != words(Sampled(every=4), 6)
    assert not sampling.resolve("auto", 4, 8, 100).losses  # type: ignore[union-attr]
    assert sampling.resolve("auto", 32, 32, 32_768).losses  # type: ignore[union-attr]
    assert not sampling.resolve("every=5", 32, 32, 32_768).losses  # type: ignore[union-attr]


@pytest.mark.parametrize("forced", [False, True])
def test_no_loss_goes_unexplained_because_its_context_is_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forced: bool
) -> None:
    prompt = support.task_prompt(load("demo"), "multikey", 512, 0.5, 1)[0]
    monkeypatch.setattr(sampling, "AUTO_NUMBERS", 1)
    request = RunRequest(
        model="demo", method="streaming_llm", budget="20%", max_new=24, against=not forced, forced_reference=forced
    )
    uid = carry_out(request, prompt.source, tmp_path, lambda *_: None, lambda: False)[0]
    with TraceReader.open(tmp_path, uid) as reader:
        sampled = reader.meta.oracle
        assert sampled is not None
        assert sampled.every > reader.n_steps
        assert sampled.losses
        found = verdict(reader)
        assert found is not None
        assert found.missed is not None
        assert found.step > 0
        assert len(reader.effects(found.step)) > 0
        loss = reader.loss()
        lost_steps = loss.loc[~loss["agrees"].astype(bool), "step"].tolist()
        assert reader.regret_by_step()["step"].tolist() == sorted({0, *lost_steps})


def test_the_reach_of_effects_depends_on_one_layer() -> None:
    eight_b = KVShape(layers=32, q_heads=32, kv_heads=8, head_dim=128, itemsize=2)
    assert effect.reach(eight_b, 32_768) == 16
    assert effect.reach(eight_b, 131_072) == 4
