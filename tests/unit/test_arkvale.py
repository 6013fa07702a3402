"""ArkVale against its rules written out in float64."""

from __future__ import annotations

import numpy as np
import pytest
from methodtrial import SHAPE, Seen, Trial

from kvlens.methods import arkvale, make_parameters

N, NEW, PAGE, SINKS, WINDOW, ROOM = 93, 26, 8, 3, 12, 5
SET = {"page": PAGE, "sinks": SINKS, "window": WINDOW, "dense_layers": 1, "tokens": SINKS + WINDOW + ROOM * PAGE}
TOP = 1
"""of 5 pages and 15 tokens half are to be the best: int(6.875 / 2 - 1.875)"""


def score(keys: np.ndarray, q: np.ndarray, volume: str) -> np.ndarray:
    """Keys [p, D] of a page, queries [H, D] -> the largest q . k in the page's box, per query head."""
    middle, half = (keys.max(0) + keys.min(0)) / 2, (keys.max(0) - keys.min(0)) / 2
    if volume == "mean":
        half = np.abs(keys - middle).mean(0)
    return q @ middle + np.abs(q) @ half


@pytest.mark.parametrize(("group", "volume"), [("layer", "mean"), ("kv_head", "range")])
def test_the_best_pages_are_recalled_for_the_worst_and_all_that_is_there_is_attended(group: str, volume: str) -> None:
    trial = Trial("arkvale", N, NEW, group=group, volume=volume, **SET)

    seen = Seen(trial.session).decided
    keys = [list(trial.keys[1, h]) for h in range(SHAPE.kv_heads)]
    there: list[set[int]] = [set() for _ in keys]
    recalled = born = 0
    for step in range(-1, NEW):
        q, k = trial.step(step) if step >= 0 else (trial.queries[:, :, -1], None)
        now = N + step + 1
        pages = -(-max(0, max(now, N + 1) - SINKS - WINDOW) // PAGE)
        paged = [np.array(mine)[SINKS : SINKS + pages * PAGE].reshape(pages, PAGE, -1) for mine in keys]
        ranks = [
            np.array([score(page, q[1, h * SHAPE.group : (h + 1) * SHAPE.group], volume) for page in paged[h]]).mean(1)
            for h in range(SHAPE.kv_heads)
        ]
        if group == "layer":
            ranks = [np.mean(ranks, 0)] * SHAPE.kv_heads
        for h, rank in enumerate(ranks):
            mine = there[h] | set(range(born, pages))  # what leaves the window is on the device
            top = set(np.argsort(-rank)[:TOP].tolist())
            while len(mine | top) > ROOM:
                mine.remove(min(mine - top, key=lambda page: rank[page]))
            recalled += step >= 0 and len(top - mine)
            there[h] = mine | top
            if step < 0:
                continue
            bias, selection = seen[1]
            tokens = [p for page in sorted(there[h]) for p in range(SINKS + page * PAGE, SINKS + (page + 1) * PAGE)]
            expected = [*range(SINKS), *tokens, *range(SINKS + pages * PAGE, now)]
            np.testing.assert_allclose(selection.score[h, 2 : 2 + pages], rank, atol=1e-4)
            for g in range(SHAPE.group):
                assert trial.attended(1, h * SHAPE.group + g, bias) == expected, (step, h)
            keys[h].append(k[1, h])
        born = pages
    assert recalled > 3, "pages came back"
    assert born * PAGE > N - WINDOW, "decoded tokens became pages"


def test_bad_parameters_are_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^arkvale: top must lie [^\n]*\.$"):
        make_parameters(arkvale.ArkVale, None, {"top": 0.0})
