"""xKV against plain formulas in float64: what a group's basis restores, and what a step attends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial
from support import ListSink, raises_code, run, task_prompt

from kvlens import methods
from kvlens.engine.models import load
from kvlens.methods.xkv import XKVParameters
from kvlens.refusal import Refusal
from kvlens.shape import KVShape

N, NEW = 75, 12
SET = {"layers_per_group": 2, "rank_k": 20, "rank_v": 31, "pre_rope": False}


def restored(states: np.ndarray, rank: int) -> np.ndarray:
    """states [L, H_kv, n, D] of a group as their best product of a rank."""
    layers, heads, n, size = states.shape
    u, s, v = np.linalg.svd(states.transpose(2, 0, 1, 3).reshape(n, -1), full_matrices=False)
    rows = (u[:, :rank] * s[:rank]) @ v[:rank]
    return rows.reshape(n, layers, heads, size).transpose(1, 2, 0, 3)


def turned(keys: torch.Tensor, positions: torch.Tensor, layer: int | None = None, back: bool = False) -> torch.Tensor:
    """Turn pairs of dimensions by an angle that grows with the position and the layer."""
    angle = positions * 0.1 * (1 + (layer or 0)) * (-1 if back else 1)
    a, b = keys.float().chunk(2, -1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def turn_all(keys: np.ndarray, back: bool) -> np.ndarray:
    """keys [L, H_kv, n, D]"""
    places = torch.arange(keys.shape[2])
    return np.stack([turned(torch.tensor(k), places, layer, back).numpy() for layer, k in enumerate(keys)])


@pytest.mark.parametrize("pre_rope", [False, True])
@pytest.mark.parametrize("together", [1, 2, 3])
def test_a_step_attends_what_a_group_shares(together: int, pre_rope: bool) -> None:
    params = {**SET, "layers_per_group": together, "pre_rope": pre_rope}
    trial = Trial("xkv", N, NEW, rotate=turned if pre_rope else None, **params)
    prompt_keys = turn_all(trial.keys, True) if pre_rope else trial.keys
    groups = [slice(0, 2)] if together > 1 else [slice(0, 1), slice(1, 2)]
    keys = np.concatenate([restored(prompt_keys[group], 20) for group in groups])
    keys = turn_all(keys, False) if pre_rope else keys
    values = np.concatenate([restored(trial.values[group], 31) for group in groups])
    for step in range(NEW):
        q, k = trial.step(step)
        keys, values = (np.concatenate([old, k[:, :, None]], 2) for old in (keys, values))
        for layer in range(SHAPE.layers):
            for head in range(SHAPE.q_heads):
                h = head // SHAPE.group
                weight = np.exp(keys[layer, h] @ q[layer, head] / np.sqrt(SHAPE.head_dim))
                out = weight @ values[layer, h] / weight.sum()
                np.testing.assert_allclose(trial.outs[layer][0, head, 0], out, atol=2e-4)


def test_full_rank_is_exact() -> None:
    trial = Trial("xkv", N, NEW, **{**SET, "rank_k": 500, "rank_v": 500})
    memory = trial.session.memory
    assert memory.packed is not None
    for layer in range(SHAPE.layers):
        keys, values = (torch.zeros(SHAPE.kv_heads, N, SHAPE.head_dim) for _ in range(2))
        keys, values = memory.packed.overlay(layer, keys, values)
        np.testing.assert_allclose(keys, trial.keys[layer], atol=1e-4)
        np.testing.assert_allclose(values, trial.values[layer], atol=1e-4)


def test_the_errors_of_a_span_are_those_of_the_decomposition() -> None:
    trial, group = Trial("xkv", N, NEW, **SET, group=10), 10
    rows = trial.session.memory.log.take_stored()
    spans = trial.session.memory.spans.rows
    assert len(rows) == SHAPE.layers * SHAPE.kv_heads * -(-N // group)
    for states, rank, name in ((trial.keys, 20, "err_k"), (trial.values, 31, "err_v")):
        difference = restored(states, rank) - states
        for row in rows:
            tokens = slice(spans[row.span].tok_start, spans[row.span].tok_end)
            off, exact = (np.linalg.norm(x[row.layer, row.kv_head, tokens]) for x in (difference, states))
            assert getattr(row, name) == pytest.approx(off / exact, abs=1e-4)


def test_a_step_reads_its_share_of_the_basis_its_matrix_and_exact_tokens() -> None:
    demo = load("demo", "cpu", "float32")
    prompt, _ = task_prompt(demo, "multikey", 300, max_new=4)
    sink, shape, n = ListSink(), demo.shape, len(prompt.ids) - 1
    params = {"layers_per_group": 2, "rank_k": 8, "rank_v": 12}
    run(demo, prompt, "xkv", overrides=params, max_new=4, sink=sink, ignore_eos=True)
    basis = 20 * (n / shape.kv_heads + shape.head_dim) * shape.itemsize
    assert len(sink.steps) == 4
    for record in sink.steps:
        exact = (record.step + 1) * shape.head_token_bytes
        np.testing.assert_allclose(record.kv["read_bytes"], basis + exact, rtol=1e-6)
        assert (record.kv["attended_tokens"] == n + record.step + 1).all()


@pytest.mark.parametrize("together", [1, 2, 4])
def test_the_bytes_held_are_those_of_the_layout(together: int) -> None:
    trial = Trial("xkv", N, NEW, **{**SET, "layers_per_group": together})
    memory = trial.session.memory
    for step in range(NEW):
        trial.step(step)
    assert memory.packed is not None
    tensors = (*memory.hot.tensors(), *memory.packed.tensors(), *memory.spans.tensors())
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    floor = methods.get("xkv").floor_bytes(trial.session.method.params, SHAPE, N, NEW)
    assert memory.layout.bytes(SHAPE) == held == floor


def test_a_model_without_rotary_positions_is_refused() -> None:
    with raises_code("no_rotary_positions", Refusal, model="random"):
        Trial("xkv", N, NEW, layers_per_group=2, rank_k=4, rank_v=4)


def test_fitted_ranks_keep_to_the_budget() -> None:
    shape = KVShape(30, 9, 3, 64, 4)
    method = methods.get("xkv")
    for share in (0.1, 0.2, 0.4):
        budget = int(share * shape.full_kv_bytes(1088))
        fitted = XKVParameters.fit(shape, 1023, 64, budget)
        assert method.floor_bytes(XKVParameters(**fitted), shape, 1023, 64) <= budget
    free = XKVParameters.fit(KVShape(32, 32, 8, 128, 2), 30_000, 64, None)
    assert (free["rank_k"], free["rank_v"]) == (512, 768)


@pytest.mark.parametrize("bad", [{"layers_per_group": 0}, {"rank_k": 0}, {"rank_v": -1}, {"group": 0}])
def test_bad_parameters_are_one_sentence(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^xkv: [^\n]*\.$"):
        methods.make_parameters(methods.get("xkv"), None, bad)
