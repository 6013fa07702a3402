"""CompressKV's calibration: scores against the NumPy reference and against transformers' own attention, layer errors,
masking."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import compresskv_reference as reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import random_llama, random_prompt

from kvlens.engine import models
from kvlens.engine.engine import Engine, Options
from kvlens.lab.calibrate.fullrun import watch
from kvlens.lab.calibrate.methods import compresskv as calibration
from kvlens.lab.calibrate.methods.compresskv_scores import HeadScores, LayerErrors
from kvlens.lab.calibrate.projection import heads_off, output_projections
from kvlens.methods.full import FullKV
from kvlens.text.prompts import PromptText


def test_head_scores_worked_out_by_hand() -> None:
    """One layer, two heads, prompt 7 5 7 9 with answer span 0..2 (tokens 7 5 7); step weights over four positions, the
    step's own key excluded for brevity. Step 1 makes 7: both heads get their mass on the span, twice in the authors'
    count since 7 stands there twice; head 0 attends position 2 most (a 7: copied), head 1 position 3 (not in the span),
    but 0, a 7, is its second. Step 2 makes 4, which is not in the span: nothing counts.
    """
    scores = HeadScores(1, 2, (7, 5, 7, 9), [0, 1, 2], 2)
    scores._mass[0] = torch.tensor([0.9, 0.4])
    scores._strongest[0] = torch.tensor([[2, 3], [3, 0]])
    scores._context = 4
    scores.token(7)
    scores.token(4)
    np.testing.assert_allclose(scores.scores["srh"], [[0.9, 0.4]])
    np.testing.assert_allclose(scores.scores["srh_code"], [[1.8, 0.8]])
    np.testing.assert_allclose(scores.scores["trh"], [[1 / 3, 0]])
    np.testing.assert_allclose(scores.scores["trh_topk"], [[1 / 3, 1 / 3]])
    assert scores.chance == 3 / 4


@pytest.mark.parametrize("seed", range(4))
def test_head_scores_equal_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, heads, kv_heads, n, size = 2, 4, 2, 30, 8
    prompt = rng.integers(0, 12, n).tolist()
    span = list(range(10, 15))
    scores = HeadScores(layers, heads, tuple(prompt), span, 5)
    steps = []
    for step in range(6):
        keys = rng.standard_normal((layers, kv_heads, n + step + 1, size))
        q = rng.standard_normal((layers, heads, size)) * 3
        weights = np.array(
            [
                [reference.softmax(keys[i, h // 2] @ q[i, h] / np.sqrt(size)) for h in range(heads)]
                for i in range(layers)
            ]
        )
        token = int(rng.integers(0, 12))
        for layer in range(layers):
            k = torch.tensor(keys[layer], dtype=torch.float32)
            scores.layer(layer, torch.tensor(q[layer], dtype=torch.float32), k, k, size**-0.5)
        scores.token(token)
        steps.append((token, weights))
    for kind, expected in reference.head_scores(steps, prompt, span, 5).items():
        np.testing.assert_allclose(scores.scores[kind], expected, atol=1e-6, err_msg=kind)


def test_layer_errors_equal_the_reference_and_leave_a_bias_out() -> None:
    rng = np.random.default_rng(3)
    heads, kv_heads, n, size = 4, 2, 20, 8
    projection = torch.nn.Linear(heads * size, 16).requires_grad_(False)
    kept = [0, 3, 9, 18, 19]
    watcher = LayerErrors([projection], [torch.tensor(kept)], n, 1e-6)
    expected = 0.0
    for step in range(3):
        keys, values = rng.standard_normal((2, kv_heads, n + step + 1, size))
        q = rng.standard_normal((heads, size))
        watcher.layer(0, *(torch.tensor(x, dtype=torch.float32) for x in (q, keys, values)), size**-0.5)
        weight = projection.weight.detach().double().numpy()
        expected += reference.layer_error(weight, q, keys, values, kept + list(range(n, n + step + 1)), 1e-6)
    assert float(watcher.errors[0]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("n", "minimal"), [(80, 32), (40, 12), (6, 32), (9, 8)])
def test_the_minimal_cache_is_what_the_reference_keeps_with_the_last_token_in_the_window(n: int, minimal: int) -> None:
    """Position n - 1 is the last prompt token's: it is fed at step 0, so it is not among the positions that are
    named."""
    model, heads = random_llama(seed=3), [[0, 3, 5], [1, 2], [7]]
    read = Engine(model).read(random_prompt(n, seed=n), queries=8)
    options = calibration.Settings(minimal=minimal)
    keys = torch.cat([read.keys, read.peeked.keys], 2).double().numpy()
    queries = torch.cat([read.last_queries, read.peeked.queries], 2).double().numpy()
    for layer, kept in enumerate(calibration.minimal_cache(read, heads, model.shape.group, options)):
        expected = reference.keep(keys[layer], queries[layer], heads[layer], minimal, 8, options.kernel)
        assert [*kept.tolist(), n - 1] == expected


def test_scores_equal_those_from_the_stock_models_own_attention(demo: Any) -> None:
    """Same prompt, same answer: attention weights of transformers' eager attention over prompt and answer in one
    pass."""
    from transformers import AutoModelForCausalLM

    options = calibration.Settings(kinds=("pass",))
    trial = next(calibration.make_trials(demo, [], 1, 512, options))
    engine = Engine(demo)
    read = engine.read(trial.prompt, queries=8)
    scores = HeadScores(demo.shape.layers, demo.shape.q_heads, trial.prompt.ids, trial.span, 3)
    made = watch(engine, trial.prompt, read, 12, scores, lambda ids: False)
    assert made == engine.run(trial.prompt, FullKV, FullKV.Parameters(), None, Options(max_new=12)).ids
    stock = AutoModelForCausalLM.from_pretrained(
        models.resolve("demo"), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        out = stock(torch.tensor([[*trial.prompt.ids, *made]]), output_attentions=True)
    n = len(trial.prompt.ids)
    weights = torch.stack([layer[0] for layer in out.attentions]).double().numpy()
    steps = [(token, weights[:, :, n - 1 + i, : n + i]) for i, token in enumerate(made)]
    for kind, expected in reference.head_scores(steps, list(trial.prompt.ids), trial.span, 3).items():
        np.testing.assert_allclose(scores.scores[kind], expected, atol=1e-4, err_msg=kind)


def test_the_answer_span_is_the_answer(demo: Any) -> None:
    for span, holds in (("answer", "The"), ("sentence", "")):
        for trial in calibration.make_trials(demo, [], 6, 512, calibration.Settings(span=span)):
            text = "".join(trial.prompt.pieces[i] for i in trial.span)
            value = trial.answer.strip().rstrip(".")
            assert text.strip() == value if holds else value in text and len(text) > len(value)


def test_calibrate_writes_a_file_that_a_run_can_use(demo: Any, tmp_path: Path) -> None:
    from kvlens.methods.calibration import read_figures
    from kvlens.methods.compresskv.method import CompressKV

    seen: list[dict[str, Any]] = []
    path = calibration.calibrate(demo, None, tmp_path / "c.json", trials=3, length=256, report=seen.append)
    found = json.loads(path.read_text())
    assert found["answered"] == found["asked"] == 3
    assert found["provenance"]["settings"]["minimal"] == 32
    assert len(seen) == 6
    params = CompressKV.Parameters(calibration=str(path))
    loaded = read_figures(CompressKV, params, demo.shape, "anything")["head scores"]
    assert sum(loaded.errors) == pytest.approx(1, abs=1e-4)
    best = {int(head) for head in np.argsort(loaded.scores["srh"][2])[-5:]}
    assert best == {0, 4, 5, 6, 7}, "docs/evidence/demo-model.md: these heads of layer 2 look the answer up"


def test_ones_own_prompts_and_haystacks(demo: Any, tmp_path: Path) -> None:
    own = PromptText(
        "The access code of Elena Marsh is 4821.\nQuestion: What is the access code of Elena Marsh? Answer:",
        " 4821.",
        ((0, 39),),
    )
    assert [t.prompt.source for t in calibration.make_trials(demo, [own], 5, 256, calibration.Settings())] == [own]
    hay = PromptText("A quiet sentence about the road. " * 60)
    trials = list(calibration.make_trials(demo, [own, hay], 2, 256, calibration.Settings()))
    assert len(trials) == 3
    assert "quiet sentence" in trials[1].prompt.source.text
    with pytest.raises(ValueError, match="too few sentences"):
        list(calibration.make_trials(demo, [PromptText("One sentence.")], 4, 1024, calibration.Settings()))
    with pytest.raises(ValueError, match="at least 128"):
        calibration.calibrate(demo, None, tmp_path / "c.json", trials=1, length=64)


def test_a_model_that_answers_nothing_is_told_so(demo: Any, tmp_path: Path) -> None:
    stranger = PromptText("The access code of Elena Marsh is 4821. Once upon a time there was a", " zebra", ((0, 39),))
    with pytest.raises(ValueError, match="answered none of 1 needle prompts"):
        calibration.calibrate(demo, [stranger], tmp_path / "c.json")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=6), st.lists(st.sampled_from("abc"), max_size=6))
def test_recall_is_a_share(answer: list[str], output: list[str]) -> None:
    value = calibration.recall(" ".join(answer), " ".join(output))
    assert 0 <= value <= 1
    if answer:
        assert calibration.recall(" ".join(answer), " ".join(answer)) == 1
        assert (value == 0) == (not set(answer) & set(output))


def test_a_head_that_is_off_has_no_columns_in_the_projection() -> None:
    loaded, other = random_llama(seed=5), random_llama(seed=5)
    ids = torch.randint(3, 500, (1, 20), generator=torch.Generator().manual_seed(0))
    off = [(0, 3), (2, 0), (2, 7)]
    size = loaded.shape.head_dim
    for layer, head in off:
        output_projections(other)[layer].weight.data[:, head * size : (head + 1) * size] = 0
    for model in (loaded, other):
        model.model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        before = loaded.model(ids).logits
        with heads_off(loaded, off):
            inside = loaded.model(ids).logits
        assert torch.equal(loaded.model(ids).logits, before)
        torch.testing.assert_close(inside, other.model(ids).logits)
        assert not torch.allclose(inside, before)


@pytest.mark.parametrize(("model", "layers", "q_heads"), [("demo", 6, 8), ("smollm2", 30, 9)])
def test_the_shipped_figures_say_where_they_come_from(model: str, layers: int, q_heads: int) -> None:
    from kvlens.methods.compresskv.heads import SHIPPED

    found = json.loads(SHIPPED[model].read_text())
    assert found["provenance"]["model"] == model
    assert found["answered"] >= 20
    assert sum(found["layer_error"]) == pytest.approx(1, abs=1e-4)
    assert [len(row) for row in found["scores"]["srh"]] == [q_heads] * layers
    assert max(map(max, found["scores"]["srh"])) > 50 * found["srh_chance"]
