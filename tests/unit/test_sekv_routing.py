"""What kvlens/lab/studies/sekv_routing.py counts: shares by hand, and a bound that is one."""

from __future__ import annotations

import pytest
import torch

from kvlens.lab.studies.sekv_routing import by_bound, by_mean, line, shares
from kvlens.lab.training.sekv.examples import Read
from kvlens.lab.training.sekv.routing import Looks


def test_shares_of_the_mass_by_hand() -> None:
    mass = torch.tensor([0.1, 0.2, 0.3, 0.0]).expand(1, 1, 2, 4)
    score = torch.tensor([[4.0, 3.0, 2.0, 1.0], [0.0, 0.0, 0.0, 9.0]])[None, None]
    mine = torch.tensor([[[True, False]]])
    assert shares(score, mass, mine) == pytest.approx([1 / 6, 0.5, 1])


def test_no_key_of_a_span_scores_above_its_bound() -> None:
    torch.manual_seed(0)
    keys, query = torch.randn(1, 2, 9, 4), torch.randn(1, 4, 3, 4)
    place = torch.tensor([[0, 1, 2], [3, 4, 0]])
    inside = torch.tensor([[True, True, True], [True, True, False]])
    found = Read(torch.empty(0), query, keys, keys, torch.ones(6), place, inside, 0.5)
    seen = Looks(query, torch.ones(1, 2, 2, 4), torch.empty(0), found.length)
    score = by_bound(found, seen)
    for head in range(4):
        each = query[0, head] @ keys[0, head // 2].T
        largest = torch.stack([each[:, :3].amax(-1), each[:, 3:5].amax(-1)], -1)
        assert (score[0, head] >= largest - 1e-6).all()
    mean = query[0, 3] @ torch.ones(4)
    torch.testing.assert_close(by_mean(found, seen)[0, 3, :, 1], mean * 0.5 + torch.tensor(2.0).log())


def test_a_line_has_the_mean_and_no_interval_of_few() -> None:
    assert line([[0.2, 0.4, 0.6], [0.4, 0.6, 0.8]])[0] == {"mean": 0.3, "interval": None}
