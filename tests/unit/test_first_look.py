"""The first range of steps of the Memory page's timeline: the selected step is in it, and the copies are few."""

from __future__ import annotations

import pandas as pd
import pytest

from kvlens.app.ui.common.state import Selection
from kvlens.app.ui.memory.view import _first_look


def moved(copies: int, steps: int) -> pd.DataFrame:
    return pd.DataFrame({"step": [-1, *range(steps)], "n": [5000, *[copies] * steps]})


@pytest.mark.parametrize(
    ("copies", "step", "shown"),
    [
        (10, 4, (4, 11)),
        (10, 30, (24, 31)),
        (200, 4, (4, 6)),
        (200, 30, (29, 31)),
        (400, 31, (31, 31)),
        (9000, 4, (4, 4)),
        (10, None, (0, 7)),
    ],
)
def test_the_selected_step_is_shown(copies: int, step: int | None, shown: tuple[int, int]) -> None:
    assert _first_look(Selection(step=step), moved(copies, 32), 31) == shown


def test_a_short_run_is_shown_whole() -> None:
    assert _first_look(Selection(step=1), moved(0, 3), 2) == (0, 2)
