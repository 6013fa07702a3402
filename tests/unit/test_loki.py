"""Loki against plain formulas in float64: the axes, the tokens that scores along them choose, and its calibration."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial

from kvlens import methods
from kvlens.lab.calibrate.methods.loki import calibrate, components
from kvlens.methods.loki.method import main_axes

N, NEW, WINDOW, PAGE, TOKENS = 160, 24, 16, 8, 44


def axes_of(keys: np.ndarray, width: int) -> np.ndarray:
    """Principal components of keys [m, D] by their singular vectors."""
    return np.linalg.svd(keys - keys.mean(0), full_matrices=False)[2][:width].T


def test_the_axes_are_the_principal_components_of_keys() -> None:
    keys = (
        np.random.default_rng(0).standard_normal((3, 90, 8)) @ np.random.default_rng(1).standard_normal((3, 8, 8)) + 2
    )
    found = main_axes(torch.tensor(keys), 3).double().numpy()
    for head in range(3):
        products = np.abs(np.sum(found[head] * axes_of(keys[head], 3), 0))
        np.testing.assert_allclose(products, 1, atol=1e-5)
    squares, sums = torch.tensor(keys).mT @ torch.tensor(keys), torch.tensor(keys).sum(1)
    axes, explained = components(squares[None], sums[None], 90)
    np.testing.assert_allclose(np.abs((axes[0, ..., :3].numpy() * found).sum(1)), 1, atol=1e-5)
    np.testing.assert_allclose(explained.sum(-1), 1)


@pytest.mark.parametrize("partial", [0.25, 1.0])
def test_the_best_tokens_along_few_axes_are_attended(partial: float) -> None:
    settings = {"tokens": TOKENS, "window": WINDOW, "page": PAGE, "most_fetched": 1.0, "window_rule": "at_least"}
    trial = Trial("loki", N, NEW, axes="prompt", partial=partial, **settings)
    width = max(1, round(partial * SHAPE.head_dim))
    keys, values = trial.keys, trial.values
    room = TOKENS - WINDOW
    for step in range(NEW):
        q, k = trial.step(step)
        keys, values = (np.concatenate([old, k[:, :, None]], 2) for old in (keys, values))
        start = trial.session.memory.hot.oldest
        if step % 5:
            continue
        for layer, kv_head in np.ndindex(SHAPE.layers, SHAPE.kv_heads):
            turn = axes_of(trial.keys[layer, kv_head], width)
            group = q[layer, kv_head * SHAPE.group : (kv_head + 1) * SHAPE.group]
            score = ((group @ turn) @ (keys[layer, kv_head, :start] @ turn).T).max(0)
            best = np.argsort(-score, kind="stable")[:room]
            read = [*best, *range(start, N + step + 1)]
            for place, query in enumerate(group):
                scores = keys[layer, kv_head, read] @ query / np.sqrt(SHAPE.head_dim)
                weights = np.exp(scores - scores.max())
                expected = weights @ values[layer, kv_head, read] / weights.sum()
                out = trial.outs[layer][0, kv_head * SHAPE.group + place, 0]
                np.testing.assert_allclose(out, expected, atol=1e-3)


def test_a_kv_head_reads_a_share_of_the_tokens_at_most() -> None:
    trial = Trial("loki", N, NEW, axes="prompt", tokens=150, window=WINDOW, page=PAGE, most_fetched=0.1)
    trial.step(0)
    recalled = trial.session.memory.hot.pool(0, 0)
    slots = recalled.slots(0)
    start, end = recalled.start["recall"], recalled.start["window"]
    assert int((slots.position[0, start:end] >= 0).sum()) <= (N + 1) // 10


def test_the_calibration_writes_axes_that_the_method_reads(tmp_path: Path) -> None:
    from kvlens.engine.models import load

    loaded = load("demo", "cpu", "float32")
    shape = loaded.shape
    out = calibrate(loaded, None, tmp_path / "axes.safetensors", prompts=2, length=160)
    origin = json.loads(out.with_suffix(".json").read_text())
    assert (origin["method"], origin["layers"], origin["axes"]) == ("loki", shape.layers, shape.head_dim // 2)
    method = methods.get("loki")
    params = methods.make_parameters(method, None, {"calibration": str(out)})
    from kvlens.methods.calibration import read_figures

    axes = read_figures(method, params, shape, "demo")["key axes"]
    assert tuple(axes.shape) == (shape.layers, shape.kv_heads, shape.head_dim, shape.head_dim // 2)
    identity = axes.float().mT @ axes.float()
    torch.testing.assert_close(identity, torch.eye(shape.head_dim // 2).expand_as(identity), atol=5e-3, rtol=0)
    with pytest.raises(ValueError, match=r"partial=0\.9"):
        read_figures(
            method, methods.make_parameters(method, None, {"calibration": str(out), "partial": 0.9}), shape, "demo"
        )
    with pytest.raises(ValueError, match="safetensors"):
        calibrate(loaded, None, tmp_path / "axes.json", prompts=1, length=160)
