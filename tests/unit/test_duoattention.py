"""DuoAttention: which tokens each KV head holds and what that costs, and its gates against the mixture in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial
from support import random_llama

from kvlens.lab.calibrate.methods.duoattention import Settings, calibrate, passkeys
from kvlens.lab.calibrate.methods.duoattention_gates import Gates, Trainer, attention
from kvlens.tiers.layout import SLOT_TABLE_BYTES

N, NEW, SINKS, RECENT = 75, 40, 3, 17
WHOLE = (1, 0)
"""layer, KV head of the largest gate"""


@pytest.fixture
def gates(tmp_path: Path) -> str:
    rows = np.full((SHAPE.layers, SHAPE.kv_heads), 0.1)
    rows[WHOLE] = 0.9
    origin = {"layers": SHAPE.layers, "q_heads": SHAPE.q_heads}
    path = tmp_path / "gates.json"
    path.write_text(json.dumps({"method": "duoattention", "provenance": origin, "gates": rows.tolist()}))
    return str(path)


def places(file: str, **more: Any) -> dict[str, Any]:
    return {"calibration": file, "sinks": SINKS, "recent": RECENT, "page": 8, "sparsity": 0.75, **more}


def test_outputs_are_full_attention_of_one_head_and_streaming_attention_of_the_others(gates: str) -> None:
    trial = Trial("duoattention", N, NEW, **places(gates))
    keys, values = trial.keys.copy(), trial.values.copy()
    memory, rows = trial.session.memory, []
    for step in range(NEW):
        q, k = trial.step(step)
        rows += [row for row in memory.log.take_cuts() if row.step >= 0]  # each step's, as a recorder takes them
        keys, values = (np.concatenate([old, k[:, :, None]], 2) for old in (keys, values))
        now = N + step + 1
        for layer, head in np.ndindex(SHAPE.layers, SHAPE.q_heads):
            at = layer, head // SHAPE.group
            seen = list(range(now)) if at == WHOLE else [*range(SINKS), *range(now - RECENT, now)]
            assert trial.lies(*at) == seen, (step, at)
            scores = keys[at][seen] @ q[layer, head] / np.sqrt(SHAPE.head_dim)
            weights = np.exp(scores - scores.max())
            expected = weights @ values[at][seen] / weights.sum()
            np.testing.assert_allclose(trial.outs[layer][0, head, 0], expected, atol=1e-5)
    slot = SHAPE.head_token_bytes + SLOT_TABLE_BYTES
    held = sum(t.untyped_storage().nbytes() for t in memory.hot.tensors())
    assert held == (N + NEW + 3 * (SINKS + RECENT)) * slot + SHAPE.layers * SHAPE.kv_heads * 8
    assert {(row.layer, row.kv_head) for row in rows} == {(0, 0), (0, 1), (1, 1)}
    assert [int(row.pos[0]) for row in rows if row.layer == 1] == list(range(N - RECENT + 1, N + NEW - RECENT))


def test_a_short_prompt_fills_the_ring_before_anything_goes(gates: str) -> None:
    trial = Trial("duoattention", 9, NEW, **places(gates))
    for step in range(NEW):
        trial.step(step)
        now = 9 + step + 1
        assert trial.lies(0, 1) == sorted({*range(min(SINKS, now)), *range(max(0, now - RECENT), now)})


def test_gates_of_equal_size_go_by_layer_and_head_and_a_missing_file_is_one_sentence(gates: str) -> None:
    assert Trial("duoattention", N, NEW, **places(gates, sparsity=0.5)).session.method.whole == {WHOLE, (0, 0)}
    assert Trial("duoattention", N, NEW, **places("", gates="none")).session.method.whole == set()
    with pytest.raises(ValueError, match=r"kvlens calibrate duoattention --model random"):
        Trial("duoattention", N, NEW)


def test_the_mixture_in_training_is_the_papers() -> None:
    rng, n = np.random.default_rng(5), 23
    q, k, v = (rng.standard_normal((heads, n, 7)) for heads in (4, 2, 2))
    alpha = rng.random((3, 2))
    layer = torch.nn.Module()
    layer.layer_idx = 1  # type: ignore[assignment]
    made, _ = attention(
        layer, *(torch.tensor(x)[None] for x in (q, k, v)), None, scaling=0.3, duo=Gates(2, 5, torch.tensor(alpha))
    )
    row, column = np.arange(n)[:, None], np.arange(n)
    for head in range(4):
        scores = q[head] @ k[head // 2].T * 0.3
        outs = []
        for seen in (column <= row, (column <= row) & ((column < 2) | (row - column < 5))):
            weights = np.where(seen, np.exp(scores), 0)
            outs.append(weights / weights.sum(-1, keepdims=True) @ v[head // 2])
        share = alpha[1, head // 2]
        np.testing.assert_allclose(made[0, :, head], share * outs[0] + (1 - share) * outs[1], atol=1e-12)


def test_a_head_that_changes_nothing_closes_and_one_that_does_stays_open() -> None:
    """The second layer's values are nothing, so that none of its heads is missed."""
    model = random_llama(num_hidden_layers=2, tie_word_embeddings=False)
    model.model.model.layers[1].self_attn.v_proj.weight.zero_()
    trainer = Trainer(model.model, (2, 2), 1, 4, rate=0.1, weight=0.05)
    ids = torch.randint(3, 500, (1, 60), generator=torch.Generator().manual_seed(0))
    counted = torch.arange(60) > 20
    for _ in range(6):
        trainer.advance(ids, counted)
    assert trainer.alpha[1].max() < 0.5 < trainer.alpha[0].min()


def test_the_command_writes_gates_that_are_the_same_again(demo: Any, tmp_path: Path) -> None:
    short = Settings(steps=2, length=320, recent=32)
    once, again = (calibrate(demo, tmp_path / name, settings=short) for name in ("a.json", "b.json"))
    assert once.read_text() == again.read_text()
    found = json.loads(once.read_text())
    assert np.array(found["gates"]).shape == (demo.shape.layers, demo.shape.kv_heads)
    assert "demo" in found["provenance"]["documents"]


def test_a_document_recites_what_it_hides() -> None:
    import random

    hay = [f"Sentence number {at} says nothing." for at in range(40)]
    made = passkeys(random.Random(1), hay, 300, Settings(keys=3, words=4), lambda piece: len(piece.split()))
    assert len(made.recited) == 3
    for start, end in made.recited:
        assert made.text.count(made.text[start:end]) == 2
    assert len(made.text.split()) <= 300
