"""Positions of keys that several tokens share."""

from __future__ import annotations

import torch

from kvlens.observing.matching import KINDS, Match, Matcher
from kvlens.observing.written import Shadow, Written

HALF = 8


def turn(keys: torch.Tensor, at: torch.Tensor, back: bool = False) -> torch.Tensor:
    angles = at.float()[:, None] / 10000 ** (torch.arange(HALF) / HALF)
    cos, sin = angles.cos(), angles.sin() * (-1 if back else 1)
    x, y = keys[:, :HALF], keys[:, HALF:]
    return torch.cat([x * cos - y * sin, y * cos + x * sin], 1)


def matched(tokens: list[int], keep: list[int], rotary: bool) -> Match:
    """Write keys of `tokens`, keep some of them, counted from 0 again, and match these."""
    torch.manual_seed(0)
    plain = torch.randn(max(tokens) + 1, 2 * HALF)[tokens]
    values = torch.randn(max(tokens) + 1, 2 * HALF)[tokens]
    keys = turn(plain, torch.arange(len(tokens))) if rotary else plain
    written = Written(Shadow(1), 0, 1)
    written.append(keys[None], values[None])
    held = turn(plain[keep], torch.arange(len(keep))) if rotary else plain[keep]
    matcher = Matcher(written, (lambda k, at: turn(k, at, back=True)) if rotary else None)
    return matcher.match(held[None], values[keep][None], torch.ones(1, len(keep), dtype=torch.bool))


def test_a_position_that_is_found_exactly_is_not_given_again() -> None:
    """Token 5 lies at 1 and at 6; position 1 stays in its place and is exact, so that the other is 6."""
    match = matched([4, 5, 1, 2, 3, 6, 5, 7], [0, 1, 6, 7], rotary=True)
    assert match.position[0].tolist() == [0, 1, 6, 7]
    assert [KINDS[kind] for kind in match.kind[0].tolist()] == ["exact", "exact", "rotated", "rotated"]
    assert not match.ambiguous.any()


def test_equal_keys_of_which_some_are_gone_are_ambiguous() -> None:
    """Token 5 lies at 1, 4 and 6; only one of the three stayed."""
    for rotary in (True, False):
        match = matched([4, 5, 1, 2, 5, 6, 5, 7], [0, 2, 6, 7], rotary=rotary)
        assert match.ambiguous[0].tolist() == [False, False, True, False]
        assert match.position[0, [0, 1, 3]].tolist() == [0, 2, 7]
        assert int(match.position[0, 2]) in (1, 4, 6)


def test_equal_keys_that_all_stayed_go_to_their_positions_in_order() -> None:
    for rotary in (True, False):
        match = matched([4, 5, 1, 2, 5, 6, 5, 7], [0, 1, 4, 6, 7], rotary=rotary)
        assert match.position[0].tolist() == [0, 1, 4, 6, 7]
        assert not match.ambiguous.any()
