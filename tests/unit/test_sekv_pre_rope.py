"""SeKV with keys decomposed before their rotary embedding: by hand, against the NumPy reference, while blocks leave, on
real models."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sekv_reference as reference
import torch
from support import BASE, ListSink, loaded, random_llama, random_prompt, run
from test_sekv_method import PARAMS, SHAPE, Trial, full_attention, tensor

from kvlens.engine.rotary import rotary_of
from kvlens.methods.run_inputs import Rotate, StepEnd
from kvlens.methods.sekv.params import SeKVParameters

PRE = dataclasses.replace(PARAMS, pre_rope=True)
ALL = dataclasses.replace(PRE, tau=0.0, form="factors", energy=1.0, max_rank=8)
"""every span is expanded from factors of full rank: what comes back is what went, if it comes back to its place"""


@pytest.fixture(scope="module")
def rotate() -> Rotate:
    """Of a Llama with heads of size 8 and theta 10000, the reference's too."""
    found = rotary_of(random_llama().model)
    assert found is not None
    return found


def turned(trial: Trial) -> Trial:
    """The trial's keys, low-rank per region as they are drawn, moved to their positions."""
    for keys in trial.keys.reshape(-1, *trial.keys.shape[2:]):
        keys[:] = reference.turn(keys, 0, 10000.0)
    return trial


def settings(params: SeKVParameters, budget: int, recall: int) -> reference.Settings:
    cap = int(params.anchor_share * budget) // (SHAPE.layers * SHAPE.kv_heads * (SHAPE.head_token_bytes + 9))
    return reference.Settings(
        params.alpha,
        params.l_min,
        params.l_max,
        params.window,
        params.dim,
        params.max_rank,
        params.sinks,
        params.zoom_rate,
        params.energy,
        params.form,
        cap,
        recall,
        params.pre_rope,
    )


@pytest.mark.parametrize("seed", range(8))
def test_a_decode_step_equals_the_reference(seed: int, rotate: Rotate) -> None:
    rng = np.random.default_rng(2000 + seed)
    params = dataclasses.replace(
        PRE,
        zoom_rate=float(rng.choice([0.3, 0.6])),
        form=str(rng.choice(["smaller", "factors"])),
        energy=float(rng.choice([0.5, 0.8, 0.95])),
        max_rank=int(rng.choice([1, 3, 8])),
    )
    n = int(rng.integers(60, 140))
    budget = int(0.8 * SHAPE.full_kv_bytes(n + 4))
    trial = turned(Trial(params, n, budget=budget, seed=seed, rotate=rotate)).prefill()
    out = trial.step(0)
    rows = trial.spans()
    ids = [i + 1 for i, row in enumerate(rows) if row[2] == "entropy"]
    fetched = 0
    for layer in range(SHAPE.layers):
        step = reference.decode_step(
            trial.keys[layer],
            trial.values[layer],
            trial.queries[layer][:, -128:],
            trial.nats,
            trial.k[layer],
            trial.v[layer],
            trial.q[layer],
            settings(params, budget, trial.session.memory.layout.zones.recall),
        )
        selection = trial.session.method.select(layer, tensor(trial.q[layer]))
        assert selection is not None
        assert np.array_equal(selection.fine.flatten(0, 1)[:, ids].numpy(), step.z)
        coarse, fine = trial.masses(layer)
        np.testing.assert_allclose(coarse[:, ids], step.coarse, atol=2e-5)
        np.testing.assert_allclose(fine[:, ids], step.fine, atol=2e-5)
        np.testing.assert_allclose(out[layer].numpy(), step.out, atol=1e-4)
        fetched += sum(map(len, step.hot))
    assert fetched, "nothing was expanded, so nothing was compared"
    trial.session.close()


def test_equal_keys_that_stand_at_different_places_have_rank_one_before_and_more_after(rotate: Rotate) -> None:
    """All keys are one vector before the rotary embedding: one component holds all of it. Afterwards each token's key
    is another vector, and one component leaves an error."""
    params = dataclasses.replace(PRE, form="factors", energy=0.999, max_rank=8)
    trial = Trial(params, 60, seed=1, rotate=rotate)
    trial.keys[:] = np.arange(1.0, 9.0)
    notes = noted(turned(trial).prefill())
    assert (notes["rank_k"] == 1).all()
    assert (notes["rank_k_post_rope"] > 1).all()
    np.testing.assert_allclose(notes["err_k_pre_rope"], 0, atol=1e-3)
    assert (notes["err_k_post_rope"] > 0.1).all()
    assert all(row.err_k < 1e-3 for row in trial.session.memory.log.take_stored())


def noted(trial: Trial) -> dict[str, np.ndarray]:
    """The journal by name: [L, H_kv, S], 'spans' [S]."""
    notes = trial.session.method.drain_journal()
    names = {note.name for note in notes} - {"spans", "logit_tau"}
    out = {"spans": next(note.values.numpy() for note in notes if note.name == "spans")}
    for name in names:
        of = {(note.layer, note.kv_head): note.values.numpy() for note in notes if note.name == name}
        out[name] = np.array([[of[layer, head] for head in range(SHAPE.kv_heads)] for layer in range(SHAPE.layers)])
    return out


@pytest.mark.parametrize("pre_rope", [False, True])
@pytest.mark.parametrize("form", ["smaller", "factors"])
def test_ranks_and_errors_that_are_noted_are_those_of_numpy(form: str, pre_rope: bool, rotate: Rotate) -> None:
    params = dataclasses.replace(PARAMS, form=form, pre_rope=pre_rope, energy=0.8, max_rank=6)
    trial = turned(Trial(params, 100, seed=7, rotate=rotate)).prefill()
    notes = noted(trial)
    rows = [(i + 1, a, b) for i, (a, b, kind) in enumerate(trial.spans()) if kind == "entropy"]
    assert notes["spans"].tolist() == [i for i, _, _ in rows]
    stored = {(row.span, row.layer, row.kv_head): row for row in trial.session.memory.log.take_stored()}
    for s, (span, a, b) in enumerate(rows):
        for at in np.ndindex(SHAPE.layers, SHAPE.kv_heads):
            post = trial.keys[at][a:b]
            pre = reference.turn(post, a, 10000.0, back=True)
            requested = {
                where: kept(x, 0.8, 6) for where, x in (("pre", pre), ("post", post), ("v", trial.values[at][a:b]))
            }
            rank = requested["pre" if pre_rope else "post"]
            assert notes["rank_k"][at][s] == rank
            assert notes["rank_v"][at][s] == requested["v"]
            if pre_rope:
                assert notes["rank_k_post_rope"][at][s] == requested["post"]
                assert notes["err_k_pre_rope"][at][s] == pytest.approx(error(pre, rank), abs=1e-4)
                assert notes["err_k_post_rope"][at][s] == pytest.approx(error(post, rank), abs=1e-4)
            row = stored[(span, *at)]
            if row.form == "factors":
                assert (row.rank_k, row.rank_v) == (rank, requested["v"])
                # In the space of attention: turning the reconstruction and the keys alike leaves the error as it was.
                approximate = truncated(pre, rank)
                after = np.linalg.norm(reference.turn(approximate, a, 10000.0) - post) / np.linalg.norm(post)
                assert row.err_k == pytest.approx(after if pre_rope else error(post, rank), abs=1e-4)
    assert ("err_k_pre_rope" in notes) == pre_rope


def packed_since(trial: Trial) -> list[int]:
    """Ids noted as packed since the last call; a session that nobody observes empties its journal at every step."""
    return [int(i) for note in trial.session.method.drain_journal() if note.name == "spans" for i in note.values]


def kept(x: np.ndarray, energy: float, most: int) -> int:
    s = np.linalg.svd(x, compute_uv=False) ** 2
    return min(most, int((np.cumsum(s) - s < energy * s.sum()).sum()))


def truncated(x: np.ndarray, rank: int) -> np.ndarray:
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    return u[:, :rank] * s[:rank] @ vt[:rank]


def error(x: np.ndarray, rank: int) -> float:
    return float(np.linalg.norm(x - truncated(x, rank)) / np.linalg.norm(x))


def test_spans_come_back_to_their_places_while_blocks_leave(rotate: Rotate) -> None:
    """Full rank and all spans expanded: attention is exact, at the first step and after decoded blocks have become
    spans."""
    trial = turned(Trial(ALL, 60, max_new=30, seed=2, rotate=rotate)).prefill()
    past: list[tuple[np.ndarray, np.ndarray]] = []
    packed = packed_since(trial)
    for step in range(30):
        out = trial.step(step, StepEnd(step - 1, 60 + step - 1, float(trial.rng.exponential()), 1.0) if step else None)
        for layer in range(SHAPE.layers):
            # The trial's own record ends with the prompt: put what was decoded since behind it.
            whole = Trial.__new__(Trial)
            whole.shape, whole.k, whole.v, whole.q = trial.shape, trial.k, trial.v, trial.q
            whole.keys, whole.values = (
                np.concatenate([x, *(y[i][:, :, None] for y in past)], 2)
                for i, x in enumerate((trial.keys, trial.values))
            )
            np.testing.assert_allclose(out[layer].numpy(), full_attention(whole, layer), atol=1e-3)
        past.append((trial.k, trial.v))
        packed += packed_since(trial)
    assert packed == [i + 1 for i, (_, _, kind) in enumerate(trial.spans()) if kind == "entropy"], (
        "every span is noted once"
    )
    assert trial.spans()[-1][1] > 70, "decoded tokens became spans"
    trial.session.close()


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 512,
            }
        },
    ),
    "partial": ("Phi", {"partial_rotary_factor": 0.5}),
    "pairs": ("Cohere", {}),
    "some layers": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_all_spans_at_full_rank_equal_fullkv_on_a_real_model(family: str) -> None:
    import transformers

    name, changes = FAMILIES[family]
    torch.manual_seed(5)
    model = loaded(
        getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**{**BASE, **changes}))
    )
    prompt = random_prompt(300, seed=8)
    full = run(model, prompt, "full", max_new=4, keep_logits=True)
    exact = {
        "window": 16,
        "block": 8,
        "l_min": 8,
        "l_max": 32,
        "dim": 4,
        "max_rank": 8,
        "tau": 0.0,
        "energy": 1.0,
        "form": "factors",
        "pre_rope": True,
    }
    sink = ListSink()
    ours = run(model, prompt, "sekv", overrides=exact, forced=tuple(full.ids), keep_logits=True, sink=sink)
    assert any(t.direction == "h2d" for record in sink.steps for t in record.transfers)
    for a, b in zip(full.logits, ours.logits, strict=True):
        torch.testing.assert_close(a, b, atol=5e-3, rtol=1e-3)


def test_a_model_without_rotary_positions_is_refused_with_a_sentence() -> None:
    with pytest.raises(ValueError, match=r"pre_rope needs rotary positions.*'tiny' has none: leave pre_rope off"):
        Trial(PRE, 60)


def test_training_refuses_pre_rope(tmp_path: Path) -> None:
    from kvlens.lab.training.sekv.train import train_sekv

    with pytest.raises(ValueError, match="leave pre_rope off"):
        train_sekv(None, None, tmp_path, 1, [[1], [2]], PRE)  # type: ignore[arg-type]
