"""What a try held beyond what the run that it was tried on had held."""

from __future__ import annotations

import pytest

from kvlens.lens.hold_changes import describe_kept, new_holds
from kvlens.meta import RunMeta
from kvlens.metaparts import Held


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
    assert list(new_holds(holds, had)) == left


def test_what_both_drop_is_counted_by_positions_once() -> None:
    """For a same KV head, whichever spans either names them by."""
    had = RunMeta(layers=2, q_heads=2, kv_heads=2, drop=(held(9, 0, 4, A), held(10, 2, 8, A), held(3, 0, 99, B)))
    assert describe_kept((), (held(3, 1, 6, A), held(4, 3, 20, A)), had) == "7 tokens dropped"
    assert describe_kept((held(3, 1, 6, A),), (held(3, 8, 20, A),), had) == ""
