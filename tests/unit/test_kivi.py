"""KIVI against quantise-dequantise written out in float64, and the bytes it really holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial
from support import ListSink, random_llama, random_prompt, run, task_prompt

from kvlens.budget import BudgetInfeasible
from kvlens.demo.encode import demo_encode
from kvlens.demo.tasks import make_prompt
from kvlens.kernels.code_bytes import code_bytes
from kvlens.kernels.quantise import look_up, pack, quantise, restore, row_bytes, table_of, unpack
from kvlens.lens.reasons import explain
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader
from kvlens.text.prompts import PromptText
from kvlens.tiers.layout import SLOT_TABLE_BYTES

GROUP, RESIDUAL, N, NEW = 8, 16, 75, 40
"""a head size of 24 is three groups; 75 is no multiple of the residual"""


def rounded(x: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Groups of GROUP along an axis, each to 2^bits levels between its least and its largest number."""
    moved = np.moveaxis(x, axis, -1)
    grouped = moved.reshape(*moved.shape[:-1], -1, GROUP)
    zero = grouped.min(-1, keepdims=True).astype(np.float16).astype(float)
    scale = (np.ptp(grouped, axis=-1)[..., None] / (2**bits - 1)).astype(np.float16).astype(float)
    codes = np.clip(np.round((grouped - zero) / scale), 0, 2**bits - 1)
    return np.moveaxis((codes * scale + zero).reshape(moved.shape), -1, axis)


def kivi(q: np.ndarray, keys: np.ndarray, values: np.ndarray, bits: int) -> np.ndarray:
    """Output of one query head at a step: keys, values [n, D], the step's own last."""
    before = len(keys) - 1
    k, v = before - before % RESIDUAL, max(before - RESIDUAL, 0)
    keys = np.vstack([rounded(keys[:k], bits, 0), keys[k:]])
    values = np.vstack([rounded(values[:v], bits, 1), values[v:]])
    scores = keys @ q / np.sqrt(len(q))
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum()


@pytest.mark.parametrize("bits", [2, 4])
def test_every_step_attends_what_the_bits_hold(bits: int) -> None:
    trial = Trial("kivi", N, NEW, bits=bits, group=GROUP, residual=RESIDUAL)
    keys, values = (of.astype(np.float32).astype(float) for of in (trial.keys, trial.values))
    for step in range(NEW):
        q, k = trial.step(step)
        new = k[:, :, None].astype(np.float32).astype(float)
        keys, values = (np.concatenate([old, new], 2) for old in (keys, values))
        for layer, head in np.ndindex(SHAPE.layers, SHAPE.q_heads):
            kv_head = head // SHAPE.group
            expected = kivi(q[layer, head], keys[layer, kv_head], values[layer, kv_head], bits)
            np.testing.assert_allclose(trial.outs[layer][0, head, 0], expected, atol=2e-3)


@pytest.mark.parametrize("bits", [2, 4])
def test_the_bytes_held_are_those_of_the_layout(bits: int) -> None:
    memory = Trial("kivi", N, NEW, bits=bits, group=GROUP, residual=RESIDUAL).session.memory
    assert memory.packed is not None
    held = sum(t.untyped_storage().nbytes() for t in (*memory.hot.tensors(), *memory.packed.tensors()))
    tokens, heads = N + NEW - 1, SHAPE.layers * SHAPE.kv_heads
    packed_keys = tokens // RESIDUAL * RESIDUAL
    numbers = heads * (packed_keys + tokens - RESIDUAL) * SHAPE.head_dim
    ring = heads * (RESIDUAL + 1) * (SHAPE.head_token_bytes + SLOT_TABLE_BYTES)
    assert held == numbers * (bits + 32 / GROUP) / 8 + ring + packed_keys * 4
    tables = sum(t.untyped_storage().nbytes() for t in memory.spans.tensors())
    assert memory.layout.bytes(SHAPE) == held + tables == memory.account.resident


def test_two_bits_in_groups_of_32_are_18_75_percent_of_16() -> None:
    assert row_bytes(64, 2, 32) / (64 * 2) == 0.1875


@pytest.mark.parametrize(("m", "bits", "group"), [(24, 2, 8), (24, 4, 32), (10, 2, 4), (7, 4, 4)])
def test_a_row_comes_back_to_half_a_level(m: int, bits: int, group: int) -> None:
    x = torch.tensor(np.random.default_rng(m).standard_normal((3, 5, m)), dtype=torch.float32)
    packed = quantise(x, bits, group)
    assert sum(t[0, 0].nbytes for t in packed) == row_bytes(m, bits, group)
    found = torch.empty_like(x)
    restore(packed, bits, group, found)
    for first in range(0, m, group):
        part = x[..., first : first + group]
        level = (part.amax(-1) - part.amin(-1))[..., None] / (2**bits - 1)
        assert ((found[..., first : first + group] - part).abs() <= 0.5 * level + 4e-3).all()


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 7, 8, 12, 64])
def test_codes_come_back_as_numbers_and_as_what_a_table_has(bits: int, m: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 5, m), generator=torch.Generator().manual_seed(m), dtype=torch.uint8)
    values, packed = torch.randn(2**bits), pack(codes, bits)
    assert packed.shape[-1] == code_bytes(m, bits)
    assert torch.equal(unpack(packed, m, bits), codes.float())
    assert torch.equal(look_up(packed, m, bits, table_of(values, bits)), values[codes.long()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_written_where_their_numbers_lie(dtype: torch.dtype) -> None:
    """Keys of groups of tokens, straight into tokens side by side, with other tokens behind them."""
    keys = torch.randn(2, 64, 8)
    packed = quantise(keys.unflatten(1, (-1, 16)).transpose(2, 3), 2, 16)
    states = torch.zeros(2, 70, 8, dtype=dtype)
    restore(packed, 2, 16, states[:, :64].unflatten(1, (-1, 16)).transpose(2, 3))
    rows = torch.empty(2, 4, 8, 16)
    restore(packed, 2, 16, rows)
    assert torch.equal(states[:, :64], rows.transpose(2, 3).flatten(1, 2).to(dtype))
    assert not states[:, 64:].any()


def test_groups_of_equal_numbers_and_of_huge_ones_stay_finite() -> None:
    x = torch.tensor([[3.0] * 8 + [-1e6, 1e6, 0, 0, 0, 0, 0, 0]])
    found = torch.empty_like(x)
    restore(quantise(x, 2, 8), 2, 8, found)
    assert (found[:, :8] == 3).all()
    assert found.isfinite().all()


def test_what_is_recorded_of_packed_tokens(demo: Any) -> None:
    prompt, _ = task_prompt(demo, "multikey", 300, max_new=40)
    sink, shape = ListSink(), demo.shape
    places = {"group": 32, "residual": 32}
    run(demo, prompt, "kivi", overrides=places, max_new=40, sink=sink, coverage=True, ignore_eos=True)
    n, value, key = len(prompt.ids) - 1, shape.head_dim * 2 // 8 + 4, shape.head_dim * (8 + 4) // 32
    half = shape.head_token_bytes // 2
    assert sink.prefilled is not None
    errors = sink.prefilled.span_heads
    assert {row.form for row in errors} == {"quantised"}
    assert len(errors) == (n - n % 32) // 32 * shape.layers * shape.kv_heads
    assert all(0 < row.err_k < 1 for row in errors)
    assert any(row.err_v is None for row in errors) == ((n - n % 32) > n - 32)
    for record in sink.steps:
        before = n + record.step
        keys, values = before - before % 32, before - 32
        assert (record.kv["attended_tokens"] == before + 1).all()
        read = keys * key + values * value + (2 * (before + 1) - keys - values) * half
        np.testing.assert_array_equal(record.kv["read_bytes"], read)
        assert (record.head["mass_quantised"] > 0).any()
        assert record.head["coverage"].min() < 0.5, "what is packed is not attended exactly"
    assert {row.state for record in sink.steps for row in record.spans} == {"quantised"}


def test_a_budget_is_met_in_bfloat16_or_refused_with_the_least() -> None:
    model = random_llama(hidden_size=256, num_attention_heads=4)
    model.model.to(torch.bfloat16)
    model.shape = type(model.shape)(**{**model.shape.__dict__, "itemsize": 2})
    prompt = random_prompt(700)
    with pytest.raises(BudgetInfeasible) as refused:
        run(model, prompt, "kivi", budget="0.15", max_new=4)
    result = run(model, prompt, "kivi", budget=f"{refused.value.smallest}B", max_new=4)
    assert result.peak_bytes == refused.value.smallest


@pytest.mark.parametrize(("places", "says"), [({"residual": 40}, "multiple"), ({"group": 6}, "multiple of 4")])
def test_parameters_that_cannot_be_are_refused(places: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Trial("kivi", N, NEW, **places)


def test_the_lens_says_how_far_the_score_of_a_packed_span_is_off(demo: Any, tmp_path: Path) -> None:
    made = make_prompt("multikey", 400, 0.3, 9_100_001, demo_encode())
    source = PromptText(made.text, made.answer, made.needle, "multikey", 1)
    request = RunRequest(
        model="demo", method="kivi", overrides={"residual": "32"}, max_new=3, ignore_eos=True, oracle="all"
    )
    uid, _, _ = carry_out(request, source, tmp_path, lambda *_: None, lambda: False)
    with TraceReader.open(tmp_path, uid) as reader:
        packed = set(reader.spans().query("state == 'quantised'")["span"].astype(int))
        triples = reader.triples(2)
        worst = next(row for row in triples.to_dict("records") if int(row["span"]) in packed)
        layer, head, span = (int(worst[name]) for name in ("layer", "kv_head", "span"))
        told = explain(reader, 2, layer, head, span)
        heads = reader.oracle_step(2)
        own = heads[(heads["layer"] == layer) & (heads["kv_head"] == head) & (heads["span"] == span)]
        row = own.loc[own["own_regret"].idxmax()]
        odds = [float(row[name]) / (1 - float(row[name])) for name in ("mass", "own")]
        error = reader.span_heads(layer, head).set_index("span").loc[span, "err_k"]
    assert told.kind == "quantised"
    assert f"keys {error:.2f}" in told.says
    assert f"{np.log(odds[0] / odds[1]):+.2f} nats" in told.says


@pytest.mark.parametrize("beyond", [0, 1, 31, 32])
def test_a_prompt_may_leave_less_than_a_group_beyond_the_residual(beyond: int) -> None:
    """Keys of whole residuals are packed then, and no whole group of values is."""
    prompt = random_prompt(128 + beyond + 1)
    sink = ListSink()
    run(random_llama(), prompt, "kivi", max_new=3, sink=sink)
    assert sink.prefilled is not None
    errors = sink.prefilled.span_heads
    assert {row.err_k is None for row in errors} == {False}
    assert any(row.err_v is not None for row in errors) == (beyond >= 32)
