"""Quest against its bound written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Trial

PAGE, N, NEW = 8, 75, 14


def bounds(keys: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Algorithm 1 for one query head: keys [m, D] in whole pages."""
    paged = keys[: len(keys) // PAGE * PAGE].reshape(-1, PAGE, len(q))
    return np.maximum(q * paged.min(1), q * paged.max(1)).sum(-1)


@pytest.mark.parametrize("group", ["native", "max"])
def test_every_query_head_attends_the_pages_of_the_largest_bound_and_the_open_one(group: str) -> None:
    trial = Trial("quest", N, NEW, page=PAGE, tokens=4 * PAGE, dense_layers=1, group=group)
    keys = {h: list(trial.keys[1, h]) for h in range(SHAPE.kv_heads)}
    seen: dict[int, torch.Tensor] = {}

    class Look:
        def layer(
            self, layer: int, q: torch.Tensor, biases: list[torch.Tensor | None], scaling: float, selection: object
        ):
            slots = trial.session.memory.attended_slots(layer, biases[0])
            seen[layer] = (slots.position.clone(), biases[0])

    trial.session.observer = Look()
    for step in range(NEW):
        q, k = trial.step(step)
        position, bias = seen[0]
        assert bias is None or bool((bias > -torch.inf).all(1)[position >= 0].all()), (
            "the first layer attends everything"
        )
        position, bias = seen[1]
        whole = (N + step) // PAGE
        for kv_head in range(SHAPE.kv_heads):
            score = [
                bounds(np.array(keys[kv_head][: whole * PAGE]), q[1, kv_head * SHAPE.group + g])
                for g in range(SHAPE.group)
            ]
            if group == "max":
                score = [np.max(score, axis=0)] * SHAPE.group
            for g in range(SHAPE.group):
                pages = np.argsort(-score[g], kind="stable")[:3]
                expected = sorted(p for page in pages for p in range(page * PAGE, page * PAGE + PAGE))
                mine = position[kv_head][bias[kv_head, g] > -torch.inf]
                assert sorted(mine.tolist()) == [*expected, *range(whole * PAGE, N + step + 1)], (step, kv_head, g)
            keys[kv_head].append(k[1, kv_head])
