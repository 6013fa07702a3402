"""Page retrieval, pages on the device and on the host, against formulas written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from methodtrial import SHAPE, Seen, Trial

from kvlens.budget import BudgetInfeasible
from kvlens.engine.holdings import UNANNOUNCED
from kvlens.methods.families.cold_plan import ColdPagesParameters
from kvlens.methods.families.host_pages import HostPageRetrieval

PAGE, N, NEW = 8, 75, 14


def bounds(keys: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Algorithm 1 for one query head: keys [m, D] in whole pages."""
    paged = keys[: len(keys) // PAGE * PAGE].reshape(-1, PAGE, len(q))
    return np.maximum(q * paged.min(1), q * paged.max(1)).sum(-1)


@pytest.mark.parametrize("group", ["native", "max"])
def test_every_query_head_attends_the_pages_of_the_largest_bound_and_the_open_one(group: str) -> None:
    trial = Trial("quest", N, NEW, page=PAGE, tokens=4 * PAGE, dense_layers=1, group=group)
    keys = {h: list(trial.keys[1, h]) for h in range(SHAPE.kv_heads)}
    seen = Seen(trial.session)
    for step in range(NEW):
        q, k = trial.step(step)
        position, bias = seen.read[0]
        assert bias is None or bool((bias > -torch.inf).all(1)[position >= 0].all()), (
            "the first layer attends everything"
        )
        position, bias = seen.read[1]
        whole = (N + step) // PAGE
        assert seen.selection[1].index_bytes == whole * 2 * SHAPE.head_dim * SHAPE.itemsize, (
            "both vectors of every whole page"
        )
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


class MeanKeys(HostPageRetrieval):
    """The least that a method of the family says: pages rank by q . their mean key, the largest of the group."""

    name, title, paper, summary = "mean_keys", "Mean keys", "none", "recalls the pages whose mean key is nearest"
    Parameters = ColdPagesParameters

    @classmethod
    def summary_numbers(cls, head_dim: int) -> int:
        return head_dim

    def summarise(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.mean(-2)

    def rank(self, q: torch.Tensor, summary: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        return q @ summary.transpose(-1, -2)


HOST = {"page": PAGE, "sinks": 3, "window": 12, "dense_layers": 1}


def test_pages_on_the_host_are_recalled_by_rank() -> None:
    trial = Trial(MeanKeys, N, 30, tokens=3 + 12 + 3 * PAGE, **HOST)
    seen, keys = Seen(trial.session), {h: list(trial.keys[1, h]) for h in range(SHAPE.kv_heads)}
    for step in range(30):
        q, k = trial.step(step)
        now = N + step + 1
        gone = -(-max(0, now - 3 - 16) // PAGE)  # the window holds 12 + 8/2 tokens at most
        window = range(3 + gone * PAGE, now)
        assert trial.attended(0, 0, seen.bias[0]) == list(range(now)), "the dense layer attends everything"
        assert seen.selection[1].index_bytes == gone * SHAPE.head_dim * SHAPE.itemsize
        for kv_head in range(SHAPE.kv_heads):
            pages = np.array(keys[kv_head][3 : 3 + gone * PAGE]).reshape(gone, PAGE, -1).mean(1)
            group = q[1, kv_head * SHAPE.group : (kv_head + 1) * SHAPE.group]
            score = (pages @ group.T).max(1)
            best = np.argsort(-score, kind="stable")[:3]
            assert seen.selection[1].requested[kv_head].tolist() == (best + 2).tolist(), (step, kv_head)
            np.testing.assert_allclose(seen.selection[1].score[kv_head, 2 : 2 + gone], score, atol=1e-5)
            expected = [p for page in sorted(best) for p in range(3 + page * PAGE, 3 + (page + 1) * PAGE)]
            for g in range(SHAPE.group):
                assert trial.attended(1, kv_head * SHAPE.group + g, seen.bias[1]) == [0, 1, 2, *expected, *window]
            keys[kv_head].append(k[1, kv_head])
    assert gone * PAGE > N - 16, "decoded tokens became pages"


@pytest.mark.parametrize("more", [0, 4000, 10**7])
def test_the_host_family_takes_what_the_budget_leaves(more: int) -> None:
    params = ColdPagesParameters(**HOST)
    floor = MeanKeys.floor_bytes(params, SHAPE, N, 30)
    with pytest.raises(BudgetInfeasible) as refused:
        Trial(MeanKeys, N, 30, budget=floor - 1, **HOST)
    assert refused.value.smallest == floor
    trial, peaks = Trial(MeanKeys, N, 30, budget=floor + more, **HOST), []
    for step in range(30):
        trial.step(step)
        peaks.append(trial.session.memory.account.peak)
    room = trial.session.memory.layout.zones_of(1).recall
    assert max(peaks) <= floor + more
    assert max(peaks) == floor or more
    assert {0: room == PAGE, 4000: room > PAGE, 10**7: room == 0}[more]
    assert UNANNOUNCED not in trial.session.account.by_name(), "the family announces its index"
