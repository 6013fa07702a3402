"""RazorAttention against its formula in float64, the bytes its heads take, and the map of heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial
from support import random_llama

from kvlens.lab.calibrate.heads import calibrate, repeated
from kvlens.methods.families.retrieval_heads import HeadMap
from kvlens.tiers.layout import SLOT_TABLE_BYTES

N, NEW, SINKS, WINDOW = 75, 6, 3, 17
WHOLE = (1, 0)
"""layer, KV head that keeps everything"""


@pytest.fixture
def heads(tmp_path: Path) -> str:
    """A map in which one KV head stands out, by one of its query heads."""
    rows = np.full((SHAPE.layers, SHAPE.q_heads), 0.1)
    rows[WHOLE[0], WHOLE[1] * SHAPE.group + 2] = 0.9
    origin = {"layers": SHAPE.layers, "q_heads": SHAPE.q_heads}
    found = {"method": "heads", "provenance": origin, "echo": rows.tolist(), "induction": rows.tolist()}
    path = tmp_path / "heads.json"
    path.write_text(json.dumps(found))
    return str(path)


def razor(q: np.ndarray, keys: np.ndarray, values: np.ndarray, whole: bool, compensate: bool) -> np.ndarray:
    """Output of one query head: keys, values [n, D] of prompt and decoded tokens, the first N the prompt's."""
    gone = [] if whole else list(range(SINKS, N - WINDOW))
    kept = [i for i in range(len(keys)) if i not in gone]
    k, v = keys[kept], values[kept]
    more = np.zeros(len(kept))
    if gone and compensate:
        k, v = np.vstack([k, keys[gone].mean(0)]), np.vstack([v, values[gone].mean(0)])
        more = np.append(more, np.log(len(gone)))
    scores = k @ q / np.sqrt(len(q)) + more
    weights = np.exp(scores - scores.max())
    return weights @ v / weights.sum()


@pytest.mark.parametrize("compensate", [True, False])
def test_outputs_are_the_papers(heads: str, compensate: bool) -> None:
    places = {"sinks": SINKS, "least_window": WINDOW, "window_share": 0.1, "page": 8, "induction": 0.25, "echo": 0.0}
    trial = Trial("razorattention", N, NEW, calibration=heads, compensate=compensate, **places)
    keys, values = trial.keys.copy(), trial.values.copy()
    for step in range(NEW):
        q, k = trial.step(step)
        keys, values = (np.concatenate([old, k[:, :, None]], 2) for old in (keys, values))
        for layer, head in np.ndindex(SHAPE.layers, SHAPE.q_heads):
            kv_head = head // SHAPE.group
            mine = (layer, kv_head) == WHOLE
            expected = razor(q[layer, head], keys[layer, kv_head], values[layer, kv_head], mine, compensate)
            np.testing.assert_allclose(trial.outs[layer][0, head, 0], expected, atol=1e-5)
    memory = trial.session.memory
    slot, short = SHAPE.head_token_bytes + SLOT_TABLE_BYTES, SINKS + WINDOW + NEW
    held = sum(t.untyped_storage().nbytes() for t in memory.hot.tensors())
    assert held == (N + NEW + 3 * short) * slot + 3 * compensate * (slot + 4)


def test_what_is_gone_is_told_per_head(heads: str) -> None:
    places = {"sinks": SINKS, "least_window": WINDOW, "window_share": 0.1, "page": 8, "induction": 0.25, "echo": 0.0}
    memory = Trial("razorattention", N, NEW, calibration=heads, **places).session.memory
    rows = {(row.layer, row.kv_head): row for row in memory.log.take_cuts()}
    assert set(rows) == {(0, 0), (0, 1), (1, 1)}
    for row in rows.values():
        assert row.dropped.sum() == N - WINDOW - SINKS
        assert np.isnan(row.score).all(), "what goes by its position has no score"
    compensation = next(row for row in memory.spans.rows if row.kind == "compensation")
    assert (compensation.tok_start, compensation.tok_end, compensation.state) == (SINKS, SINKS, "coarse")


def test_a_prompt_that_the_window_covers_is_kept_whole(heads: str) -> None:
    trial = Trial("razorattention", N, NEW, calibration=heads, least_window=N)
    for layer, head in np.ndindex(SHAPE.layers, SHAPE.kv_heads):
        assert trial.lies(layer, head) == list(range(N))


def test_a_missing_map_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"kvlens calibrate heads --model random"):
        Trial("razorattention", N, NEW)


def test_the_best_of_a_group_counts_and_shares_round_up() -> None:
    scores = HeadMap([[0.1, 0.2, 0.9, 0.0], [0.3, 0.3, 0.0, 0.9]], [[0.0] * 4] * 2)
    assert scores.best("echo", 0.3, 2) == [(0, 1), (1, 1)]
    assert scores.best("echo", 0.0, 2) == []
    assert scores.best("induction", 0.5, 2) == [(0, 0), (0, 1)]


def test_echo_and_induction_against_the_whole_matrix() -> None:
    rng, period, first, n = np.random.default_rng(3), 5, 1, 21
    q, keys = rng.standard_normal((4, n, 6)), rng.standard_normal((2, n, 6))
    echo, induction = repeated(torch.tensor(q), torch.tensor(keys), 6**-0.5, period, first)
    for head in range(4):
        scores = q[head] @ keys[head // 2].T / np.sqrt(6)
        weights = np.exp(scores) * np.tri(n)
        weights /= weights.sum(-1, keepdims=True)
        copies = [[j for j in range(first, i) if (i - j) % period == 0] for i in range(first + period, n)]
        seen = [sum(weights[i, j] for j in js) for i, js in enumerate(copies, first + period)]
        after = [sum(weights[i, j + 1] for j in js) for i, js in enumerate(copies, first + period)]
        np.testing.assert_allclose(echo[head], np.mean(seen), rtol=1e-5)
        np.testing.assert_allclose(induction[head], np.mean(after), rtol=1e-5)


def test_the_command_writes_a_map_that_is_the_same_again(tmp_path: Path) -> None:
    model: Any = random_llama()
    model.model.config.name_or_path = "random"
    once, again = (calibrate(model, tmp_path / name, 40, 3, needles=0) for name in ("a.json", "b.json"))
    assert once.read_text() == again.read_text()
    found = json.loads(once.read_text())
    assert found["provenance"]["period"] == 40
    assert np.array(found["echo"]).shape == (model.shape.layers, model.shape.q_heads)
    assert 0 < np.array(found["induction"]).max() < 1
    assert "needle" not in found
