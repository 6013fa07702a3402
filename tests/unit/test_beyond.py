"""What a try held beyond what the run that it was tried on had held."""

from __future__ import annotations

import pytest

from kvlens.lens.beyond import beyond
from kvlens.meta import Held


def held(span: int, start: int, end: int, *heads: tuple[int, int], step: int = 0, whole: bool = True) -> Held:
    return Held(span=span, tok_start=start, tok_end=end, heads=heads, from_step=step, whole=whole)


A, B = (0, 0), (1, 1)


@pytest.mark.parametrize(
    ("holds", "had", "left"),
    [
        ([held(3, 0, 8, A)], [], [held(3, 0, 8, A)]),
        ([held(3, 0, 8, A)], [held(3, 0, 8, A)], []),
        ([held(3, 0, 8, A)], [held(9, 0, 4, A), held(10, 4, 8, A)], []),
        ([held(3, 0, 8, A, B)], [held(3, 0, 8, A)], [held(3, 0, 8, B)]),
        ([held(3, 0, 8, A)], [held(3, 2, 4, A)], [held(3, 0, 2, A, whole=False), held(3, 4, 8, A, whole=False)]),
        ([held(3, 0, 8, A)], [held(3, 0, 8, A, step=2)], [held(3, 0, 8, A)]),
        ([held(3, 0, 8, A, step=2)], [held(3, 0, 8, A)], []),
        ([held(3, 4, 8, A)], [held(1, 0, 2, A), held(2, 20, 30, A)], [held(3, 4, 8, A)]),
        ([held(3, 0, 2_000_000_000, A)], [held(3, 0, 1, A)], [held(3, 1, 2_000_000_000, A, whole=False)]),
    ],
)
def test_what_is_left(holds: list[Held], had: list[Held], left: list[Held]) -> None:
    assert list(beyond(holds, had)) == left
