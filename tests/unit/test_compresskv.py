"""CompressKV on real memory: by hand, against the NumPy reference, its arithmetic as properties, at its limits."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import compresskv_reference as reference
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import raises_code

from kvlens.budget import BudgetInfeasible
from kvlens.engine.session import Session
from kvlens.methods.compresskv.heads import choose_heads
from kvlens.methods.compresskv.method import CompressKV
from kvlens.methods.compresskv.params import CompressKVParameters
from kvlens.methods.families.prompt_eviction import affordable, kept_layout
from kvlens.methods.families.token_shares import allocate
from kvlens.methods.run_inputs import RunContext
from kvlens.shape import KVShape
from kvlens.tiers.slots import FREE

SHAPE = KVShape(layers=3, q_heads=8, kv_heads=2, head_dim=8, itemsize=4)
PARAMS = CompressKVParameters(window=4, kernel=5, top_heads=3, floor=6, tokens=16, page=8)
UNCALIBRATED = CompressKVParameters(window=4, floor=6, heads="all", layers="equal", page=8)
BEFORE = dataclasses.replace(UNCALIBRATED, peek=False)


def write_calibration(path: Path, shape: KVShape, seed: int = 0, **changes: Any) -> tuple[str, dict[str, Any]]:
    """A calibration file with random figures."""
    rng = np.random.default_rng(seed)
    errors = rng.random(shape.layers) + 0.05
    kinds = ("srh", "srh_code", "trh", "trh_topk")
    figures = {
        "scores": {kind: rng.random((shape.layers, shape.q_heads)).tolist() for kind in kinds},
        "layer_error": (errors / errors.sum()).tolist(),
        **changes,
    }
    origin = {"layers": shape.layers, "q_heads": shape.q_heads}
    path.write_text(json.dumps({"method": "compresskv", "provenance": origin, **figures}))
    return str(path), figures


class Trial:
    """A session driven by hand with a random prompt of n tokens and a last one; keeps all keys and values beside it."""

    def __init__(
        self,
        params: CompressKVParameters,
        n: int,
        limit: int | None = None,
        shape: KVShape = SHAPE,
        max_new: int = 4,
        seed: int = 0,
    ):
        rng = np.random.default_rng(seed)
        self.rng, self.shape, self.n = rng, shape, n
        self.ask: np.ndarray | None = None
        """the query [L, H, D] of the steps; None: random"""
        full = shape.full_kv_bytes(n + max_new)
        context = RunContext(shape, n, max_new, limit, full, seed, "tiny", torch.float32, torch.device("cpu"))
        self.session = Session(CompressKV, params, context)
        self.keys, self.values = rng.standard_normal((2, shape.layers, shape.kv_heads, n + 1, shape.head_dim)) * 1.5
        self.queries = rng.standard_normal((shape.layers, shape.q_heads, n + 1, shape.head_dim)) * 1.5

    def prefill(self) -> Trial:
        self._put(slice(0, self.n))
        with self.session.observed.peek():
            self._put(slice(self.n, self.n + 1))
        self.session.finish_prefill(torch.zeros(self.n))
        self.journal = self.session.method.drain_journal()
        return self

    def _put(self, at: slice) -> None:
        for layer in range(self.shape.layers):
            self.session.write(layer, tensor(self.keys[layer][:, at]), tensor(self.values[layer][:, at]))
            self.session.attend(layer, tensor(self.queries[layer][:, at])[None], self.shape.head_dim**-0.5)

    def step(self, step: int) -> np.ndarray:
        """A decode step -> outputs [L, H, D]. Step 0 feeds the last prompt token, the others a random one, which is
        appended to keys and values. The query of step 0 is another than the one that was peeked, as it is when a method
        has changed the layers below."""
        shape, rng = self.shape, self.rng
        self.session.begin_step(step, None)
        if step:
            new = rng.standard_normal((2, shape.layers, shape.kv_heads, 1, shape.head_dim))
            self.keys, self.values = (
                np.concatenate([old, x], 2) for old, x in zip((self.keys, self.values), new, strict=True)
            )
        new_k, new_v = self.keys[:, :, self.n + step, None], self.values[:, :, self.n + step, None]
        self.q = (
            rng.standard_normal((shape.layers, shape.q_heads, shape.head_dim)) * 1.5 if self.ask is None else self.ask
        )
        out = []
        for layer in range(shape.layers):
            self.session.write(layer, tensor(new_k[layer]), tensor(new_v[layer]))
            out.append(
                self.session.attend(layer, tensor(self.q[layer])[None, :, None], shape.head_dim**-0.5)[0, :, 0].numpy()
            )
        return np.stack(out)

    def kept(self, layer: int) -> list[list[int]]:
        """Positions on the device per KV head."""
        slots = self.session.memory.hot.slots(layer)
        return [sorted(slots.position[g][slots.role[g] != FREE].tolist()) for g in range(self.shape.kv_heads)]

    def noted(self, name: str) -> list[np.ndarray]:
        return [note.values.numpy() for note in self.journal if note.name == name]


def tensor(x: np.ndarray) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float32)


def test_small_case_worked_out_by_hand(tmp_path: Path) -> None:
    """One layer, two query heads on one KV head, D = 2, seven prompt tokens, the last of them peeked, window 2, kernel
    3, five tokens kept.

    Head 1 has the higher score and chooses. Its queries are (sqrt 2 ln 8, 0), the key of token 2 is (1, 0), that of
    token 4 (0, 1), all others (0, 0): after scaling, token 2 weighs 8 and every other 1. Position 5 sees six tokens
    (sum 13), position 6 seven (sum 14). With a = 1/13 + 1/14 the tokens before the window receive a, a, 8a, a, a;
    averaged over three neighbours (zeros outside): 2a/3, 10a/3, 10a/3, 10a/3, 2a/3. So 1, 2, 3 and the window 5, 6
    stay, 6 when step 0 feeds it. Head 0 would have chosen token 4, and does not get it. Of page 0..3 three tokens of
    four are left (partial), of page 4 none (evicted).
    """
    shape = KVShape(1, 2, 1, 2, 4)
    scores = {kind: [[0.1, 0.9]] for kind in ("srh", "srh_code", "trh", "trh_topk")}
    path, _ = write_calibration(tmp_path / "c.json", shape, scores=scores)
    params = CompressKVParameters(window=2, kernel=3, top_heads=1, floor=2, tokens=5, page=4, calibration=path)
    trial = Trial(params, 6, shape=shape)
    trial.keys[:] = 0
    trial.keys[0, 0, 2], trial.keys[0, 0, 4] = (1, 0), (0, 1)
    up = math.sqrt(2) * math.log(8)
    trial.queries[0, 0], trial.queries[0, 1] = (0, up), (up, 0)
    trial.prefill()
    assert trial.kept(0) == [[1, 2, 3, 5]]
    a = 1 / 13 + 1 / 14
    np.testing.assert_allclose(
        trial.noted("token_score")[0], [2 * a / 3, *[10 * a / 3] * 3, 2 * a / 3, np.nan, np.nan], rtol=1e-5
    )
    assert trial.noted("selector")[0].tolist() == [0, 1]
    assert trial.noted("kept_tokens")[0].tolist() == [0, 1, 1, 1, 0, 1, 1]
    rows = trial.session.memory.spans.rows[1:]
    assert [(row.tok_start, row.tok_end, row.state) for row in rows] == [(0, 4, "partial"), (4, 5, "evicted")]
    trial.ask = np.array([[[0, up], [up, 0]]])
    out = trial.step(0)
    assert trial.kept(0) == [[1, 2, 3, 5, 6]]
    v = trial.values[0, 0]
    np.testing.assert_allclose(
        out[0, 0], v[[1, 2, 3, 5, 6]].mean(0), atol=1e-6
    )  # token 4 is gone: nothing else stands out
    np.testing.assert_allclose(out[0, 1], (8 * v[2] + v[[1, 3, 5, 6]].sum(0)) / 12, atol=1e-6)


def test_the_last_prompt_token_decides_when_only_it_looks() -> None:
    """One layer, one head, D = 1, eight tokens, window 3, kernel 1, four kept: one besides the window. Only the last
    prompt token has a query that is not 0; it attends token 2 (ln 64 against 0: weight 64 / 71), the others attend all
    alike. With it in the window token 2 stays; without it the window is 4, 5, 6, all scores before it are equal, and
    the first token stays."""
    shape = KVShape(1, 1, 1, 1, 4)
    for peek, kept in ((True, [2, 5, 6, 7]), (False, [0, 4, 5, 6, 7])):
        params = CompressKVParameters(
            window=3, kernel=1, floor=3, tokens=4, heads="all", layers="equal", page=4, peek=peek
        )
        trial = Trial(params, 7, shape=shape)
        trial.keys[:], trial.queries[:] = 0, 0
        trial.keys[0, 0, 2], trial.queries[0, 0, 7] = 1, math.log(64)
        trial.prefill()
        if peek:
            at = 1 / 6 + 1 / 7
            np.testing.assert_allclose(
                trial.noted("token_score")[0][:3], [at + 1 / 71, at + 1 / 71, at + 64 / 71], rtol=1e-5
            )
        trial.step(0)
        assert trial.kept(0) == [kept]


@pytest.mark.parametrize("peek", [True, False])
@pytest.mark.parametrize("heads", ["srh", "trh", "all"])
@pytest.mark.parametrize(("n", "tokens", "kernel"), [(60, 16, 5), (41, 12, 3), (33, 30, 7), (25, 40, 5)])
def test_equals_the_reference_over_steps(
    tmp_path: Path, heads: str, n: int, tokens: int, kernel: int, peek: bool
) -> None:
    """The prompt has n + 1 tokens; without peeking the reference is given the first n of them as the prompt."""
    path, figures = write_calibration(tmp_path / "c.json", SHAPE, seed=n)
    params = dataclasses.replace(PARAMS, tokens=tokens, kernel=kernel, heads=heads, calibration=path, peek=peek)
    trial = Trial(params, n, seed=n).prefill()
    prompt = n + peek
    budgets = reference.layer_tokens(figures["layer_error"], tokens, params.floor, params.ceiling, prompt)
    assert trial.noted("layer_budget_tokens")[0].tolist() == budgets
    kept = []
    for layer in range(SHAPE.layers):
        scores = figures["scores"].get(heads, [[]] * SHAPE.layers)[layer]
        of = sorted(range(SHAPE.q_heads), key=lambda h: -scores[h])[:3] if scores else list(range(SHAPE.q_heads))
        here = slice(0, prompt)
        kept.append(
            reference.keep(trial.keys[layer][:, here], trial.queries[layer][:, here], of, budgets[layer], 4, kernel)
        )
        assert len(kept[layer]) == budgets[layer]
        assert np.flatnonzero(trial.noted("kept_tokens")[layer]).tolist() == kept[layer]
        assert trial.kept(layer) == [[p for p in kept[layer] if p < n]] * SHAPE.kv_heads
    for step in range(4):
        out = trial.step(step)
        for layer in range(SHAPE.layers):
            use = sorted({*kept[layer], *range(n, n + step + 1)})
            expected = reference.attend(trial.q[layer], trial.keys[layer], trial.values[layer], use)
            np.testing.assert_allclose(out[layer], expected, atol=2e-5)


def test_a_token_lost_in_one_layer_is_told_for_that_layer(tmp_path: Path) -> None:
    path, _ = write_calibration(tmp_path / "c.json", SHAPE)
    trial = Trial(dataclasses.replace(PARAMS, calibration=path), 60).prefill()
    lost = {(e.layer, e.span) for e in trial.session.memory.log if e.kind == "evict" and e.layer is not None}
    for span, row in enumerate(trial.session.memory.spans.rows[1:], 1):
        inside = [layer for layer in range(3) if any(row.tok_start <= p < row.tok_end for p in trial.kept(layer)[0])]
        assert row.state == ("evicted" if not inside else "partial")
        assert {layer for layer, of in lost if of == span} == (set(range(3)) - set(inside) if inside else set())


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_allocation_adds_up_and_favours_errors(data: st.DataObject) -> None:
    errors = data.draw(st.lists(st.floats(0, 1), min_size=1, max_size=12))
    floor = data.draw(st.integers(1, 40))
    most = data.draw(st.integers(floor, 400))
    total = data.draw(st.integers(len(errors) * floor, len(errors) * most))
    tokens = allocate(errors, total, floor, most)
    assert sum(tokens) == total
    assert all(floor <= t <= most for t in tokens)
    for a, x in zip(errors, tokens, strict=True):
        assert all(x >= y for b, y in zip(errors, tokens, strict=True) if a > b)


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(1, 300),
    floor=st.integers(1, 40),
    extra=st.integers(0, 200_000),
    max_new=st.integers(1, 30),
    page=st.integers(1, 32),
    last=st.integers(0, 1),
)
def test_the_byte_budget_is_used_to_the_last_token(
    n: int, floor: int, extra: int, max_new: int, page: int, last: int
) -> None:
    floor = min(floor, n + last)
    least = kept_layout([[floor]] * SHAPE.layers, 1, n, max_new, page, last).bytes(SHAPE)
    total = affordable(least + extra, SHAPE, floor, n, max_new, page, last)
    tokens = [total // 3 + (i < total % 3) for i in range(3)]
    used = kept_layout([[count] for count in tokens], 1, n, max_new, page, last).bytes(SHAPE)
    token = SHAPE.kv_heads * (SHAPE.head_token_bytes + 9)
    assert used <= least + extra
    assert total == 3 * (n + last) or least + extra - used < token


@settings(max_examples=200, deadline=None)
@given(
    n=st.integers(1, 60),
    tokens=st.integers(1, 70),
    window=st.integers(1, 30),
    max_new=st.integers(1, 9),
    last=st.integers(0, 1),
)
def test_every_prompt_token_has_one_slot(n: int, tokens: int, window: int, max_new: int, last: int) -> None:
    """Kept, window and the slot of step 0 make up the tokens kept of the prompt, the last one not twice; decoded tokens
    come on top."""
    tokens = min(max(tokens, min(window, n + last)), n + last)
    layout = kept_layout([[tokens]] * 2, window, n, max_new, 16, last)
    zones, inside = layout.zones_of(0), n - layout.window_from
    assert zones.kept + zones.window == tokens + max_new - last
    assert inside >= 0
    assert zones.window == inside + max_new
    assert inside == (0 if tokens == n + last else min(window, n + last) - last)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=16), st.integers(1, 20))
def test_choosing_heads(scores: list[int], count: int) -> None:
    heads = choose_heads([float(s) for s in scores], len(scores), count, "all")
    if max(scores) == 0:
        assert heads == list(range(len(scores)))
        return
    assert heads == sorted(heads)
    assert len(heads) == min(count, len(scores))
    for left_out in set(range(len(scores))) - set(heads):
        assert all((scores[left_out], -left_out) < (scores[head], -head) for head in heads)


def test_unscored_layers_and_equal_scores() -> None:
    assert choose_heads([0.0, 0.0, 0.0], 3, 2, "all") == [0, 1, 2]
    assert choose_heads([0.0, 0.0, 0.0], 3, 2, "first") == [0, 1]
    assert choose_heads([0.0, 0.5, 0.5], 3, 1, "all") == [1]
    assert choose_heads(None, 3, 1, "first") == [0, 1, 2]


@pytest.mark.parametrize("params", [UNCALIBRATED, BEFORE, dataclasses.replace(UNCALIBRATED, window=1, floor=1)])
def test_budget_is_kept_at_the_floor_and_refused_below(params: CompressKVParameters) -> None:
    n, max_new = 90, 4
    floor = CompressKV.floor_bytes(params, SHAPE, n, max_new)
    trial = Trial(params, n, floor).prefill()
    for step in range(max_new):
        trial.step(step)
    assert trial.session.memory.account.peak == floor
    assert len(trial.kept(0)[0]) == params.floor + max_new - params.peek
    with pytest.raises(BudgetInfeasible):
        Trial(params, n, floor - 1).prefill()


@pytest.mark.parametrize("params", [UNCALIBRATED, BEFORE])
@pytest.mark.parametrize("n", [1, 3, 4, 5, 6, 7, 9])
def test_short_prompts_keep_what_fits(n: int, params: CompressKVParameters) -> None:
    floor = CompressKV.floor_bytes(params, SHAPE, n, 4)
    trial = Trial(params, n, floor).prefill()
    out = trial.step(0)
    use = trial.kept(1)[0]
    np.testing.assert_allclose(out[1], reference.attend(trial.q[1], trial.keys[1], trial.values[1], use), atol=2e-5)
    assert len(use) == (min(n + 1, 6) if params.peek else min(n, 6) + 1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"window": 0}, "window"),
        ({"window": 65, "floor": 99}, "window must be at most 64"),
        ({"kernel": 4}, "kernel must be odd"),
        ({"floor": 3}, "floor must be at least the window"),
        ({"ceiling": 0.5}, "ceiling"),
        ({"tokens": 5}, "tokens must be 0 or"),
        ({"top_heads": 0}, "top_heads"),
        ({"page": 0}, "page"),
    ],
)
def test_parameters_refuse_nonsense(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        dataclasses.replace(PARAMS, **changes)


def test_a_missing_or_wrong_calibration_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kvlens calibrate compresskv --model tiny.*heads=all and layers=equal"):
        Trial(PARAMS, 30)
    with pytest.raises(ValueError, match="does not exist"):
        Trial(dataclasses.replace(PARAMS, calibration=str(tmp_path / "no.json")), 30)
    other, _ = write_calibration(tmp_path / "o.json", KVShape(2, 8, 2, 8, 4))
    with pytest.raises(ValueError, match="this model has 3 of 8"):
        Trial(dataclasses.replace(PARAMS, calibration=other), 30)
    for number, changes in enumerate(({"layer_error": [1.0]}, {"scores": {}}, {"layer_error": [0.5, 0.7, -0.2]})):
        bad, _ = write_calibration(tmp_path / f"{number}.json", SHAPE, **changes)
        with raises_code(("scores_missing", "other_file", "scores_missing")[number], ValueError):
            Trial(dataclasses.replace(PARAMS, calibration=bad), 30)


def test_what_needs_no_calibration_reads_none() -> None:
    trial = Trial(UNCALIBRATED, 30, SHAPE.full_kv_bytes(20)).prefill()
    assert trial.noted("srh_score") == []
    assert trial.noted("layer_error") == []
    assert [mask.tolist() for mask in trial.noted("selector")] == [[1.0] * 8] * 3
