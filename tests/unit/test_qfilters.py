"""Q-Filters: filters and scores against float64, and what happens without filters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial
from test_prompt_eviction import best

from kvlens import methods
from kvlens.lab.calibrate.methods import qfilters
from kvlens.methods.calibration import require

N, TOKENS, WINDOW = 203, 37, 11


def test_a_filter_is_the_main_direction_on_the_side_of_the_queries() -> None:
    rng = np.random.default_rng(0)
    axis = rng.standard_normal((1, 4, 6))
    axis /= np.linalg.norm(axis, axis=-1, keepdims=True)
    queries = rng.standard_normal((1, 4, 500, 6)) * 0.3 + (2 + rng.random((1, 4, 500, 1))) * axis[:, :, None]
    tensor = torch.tensor(queries)
    found = np.array(qfilters.filters(tensor.mT @ tensor, tensor.sum(2), 2))
    for head in range(2):
        mains = []
        for query_head in (2 * head, 2 * head + 1):
            main = np.linalg.svd(queries[0, query_head])[2][0]
            mains.append(main * np.sign((queries[0, query_head] @ main).sum()))
        np.testing.assert_allclose(found[0, head], np.mean(mains, axis=0), atol=1e-5)


def test_keys_along_the_filter_stay(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    filters = rng.standard_normal((SHAPE.layers, SHAPE.kv_heads, SHAPE.head_dim))
    origin = {"layers": SHAPE.layers, "q_heads": SHAPE.q_heads}
    file = tmp_path / "filters.json"
    file.write_text(json.dumps({"method": "qfilters", "provenance": origin, "filters": filters.tolist()}))
    trial = Trial("qfilters", N, 5, tokens=TOKENS, window=WINDOW, calibration=str(file))
    for layer in range(SHAPE.layers):
        for head in range(SHAPE.kv_heads):
            score = trial.keys[layer, head, : N - WINDOW] @ filters[layer, head]
            expected = best(score, TOKENS - WINDOW)
            assert trial.lies(layer, head) == [*expected, *range(N - WINDOW, N)]
    short: dict[str, Any] = {"method": "qfilters", "provenance": origin, "filters": filters[:, :1].tolist()}
    file.write_text(json.dumps(short))
    with pytest.raises(ValueError, match="every KV head"):
        Trial("qfilters", N, 5, tokens=TOKENS, calibration=str(file))


def test_a_model_without_filters_is_refused_before_it_is_loaded() -> None:
    method = methods.get("qfilters")
    with pytest.raises(ValueError, match="kvlens calibrate qfilters"):
        require(method, method.Parameters(), "another")
    require(method, method.Parameters(filters="drawn"), "another")
    for model in ("demo", "smollm2"):
        require(method, method.Parameters(), model)
