"""What the GPU bench makes of choices that differ between two devices: a tie is named and passes, anything else does
not."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from fakecuda import FakeCuda, on_cuda

from kvlens.lab.gpu import tier
from kvlens.lab.gpu.choices import DRAWS, Probe, _placed, _selected, compare, watched
from kvlens.lab.gpu.tier import Ground, Way, choice_row
from kvlens.lab.gpu.verdicts import TIE, Choice, Verdict
from kvlens.memory.placement import Blend, Kept, Placement, Selection
from kvlens.methods.base import Method
from kvlens.methods.run_inputs import RunContext
from kvlens.spans import Span

SCORES = torch.tensor([[4.0, 3.0, 2.0, 1.0], [8.0, 7.0, 6.0, 5.0]])


def read(*spans: int, step: int = 2, layer: int | None = 1, scores: torch.Tensor | None = SCORES) -> Choice:
    """KV head 0 reads the first span, KV head 1 these."""
    chosen = torch.zeros(2, 4, dtype=torch.bool)
    chosen[0, 0] = chosen[1, list(spans)] = True
    return Choice(step, layer, "spans read", chosen, scores)


def near(apart: float) -> torch.Tensor:
    """Spans 1 and 2 of KV head 1 lie so close."""
    scores = SCORES.clone()
    scores[1, 2] = scores[1, 1] - apart
    return scores


def test_equal_choices_pass() -> None:
    verdict = compare([read(0, 1), read(0, 2, step=3)], [read(0, 1), read(0, 2, step=3)])
    assert verdict == Verdict("all 2 are equal")
    assert choice_row("m", verdict).passed


def test_a_wrong_choice_is_a_failed_check_with_its_place_and_margin() -> None:
    verdict = compare([read(0, 1)], [read(0, 2)])
    assert (verdict.step, verdict.margin) == (2, 1 / 7)
    row = choice_row("m", verdict)
    assert (row.passed, row.error, row.tolerance) == (False, 1 / 7, TIE)
    assert row.name == ("m: choices, the first that differs: spans read at step 2, L1 KV1: scores 1 apart, of about 7")


def test_a_tie_within_rounding_is_named_and_passes() -> None:
    scores = near(1e-6)
    row = choice_row("m", compare([read(0, 1, scores=scores)], [read(0, 2, scores=scores)]))
    assert row.passed
    assert 0 < row.error <= TIE
    assert row.name.endswith("spans read at step 2, L1 KV1: scores 9.5e-07 apart, of about 7, a tie")


@pytest.mark.parametrize(("moved", "passes"), [(1e-6, True), (0.1, False)])
def test_where_nothing_changes_places_the_score_has_crossed_a_bound(moved: float, passes: bool) -> None:
    other = SCORES.clone()
    other[1, 2] += moved
    verdict = compare([read(0, 1)], [read(0, 1, 2, scores=other)])
    assert choice_row("m", verdict).passed is passes


def test_how_close_is_a_matter_of_the_scores_at_hand() -> None:
    """A sink's does not make all others ties; a sum near zero is rounded as what was added up."""
    beside_a_sink = torch.tensor([[1.0] * 4, [0.9, 2e-5, 1e-5, 1e-6]])
    assert not choice_row("m", compare([read(0, 1, scores=beside_a_sink)], [read(0, 2, scores=beside_a_sink)])).passed
    near_zero = torch.tensor([[1.0] * 4, [9.0, 1e-5, -1e-5, -8.0]])
    assert choice_row("m", compare([read(0, 1, scores=near_zero)], [read(0, 2, scores=near_zero)])).passed


def test_without_a_score_nothing_explains_a_difference() -> None:
    row = choice_row("m", compare([read(0, 1, scores=None)], [read(0, 2, scores=None)]))
    assert (row.passed, row.error) == (False, -1.0)
    assert "no score says how close it was" in row.name
    scores = SCORES.clone()
    scores[1, 2] = torch.nan
    assert compare([read(0, 1, scores=scores)], [read(0, 2, scores=scores)]).margin is None


def test_of_decode_steps_the_first_layer_is_judged_and_of_the_prompt_all() -> None:
    """What a layer attends moves the next one's query; when the prompt is placed all layers choose from what was
    read."""
    tie = near(1e-6)
    for step, passes in ((2, True), (-1, False)):
        host = [read(0, 1, step=step, layer=0, scores=tie), read(0, 1, step=step, layer=1)]
        ours = [read(0, 2, step=step, layer=0, scores=tie), read(0, 2, step=step, layer=1)]
        assert choice_row("m", compare(host, ours)).passed is passes
    assert "and 1 more of it" in compare(host, ours).text


def test_other_calls_and_other_shapes_are_no_ties() -> None:
    assert not choice_row("m", compare([read(0)], [read(0, step=3)])).passed
    assert not choice_row("m", compare([read(0)], [read(0), read(1)])).passed
    wide = Choice(2, 1, "spans read", torch.zeros(2, 5, dtype=torch.bool), None)
    assert not choice_row("m", compare([read(0)], [wide])).passed


@pytest.mark.parametrize(("score", "passes"), [(1.000001, True), (1.1, False)])
def test_an_eviction_is_a_tie_where_both_gave_up_as_little(score: float, passes: bool) -> None:
    host = Choice(1, 0, "evicted", torch.tensor([[3], [5]]), torch.tensor([[1.0], [2.0]]))
    ours = Choice(1, 0, "evicted", torch.tensor([[4], [5]]), torch.tensor([[score], [2.0]]))
    assert choice_row("m", compare([host], [ours])).passed is passes


# a choice without scores


class Nearest:
    """Attends the token whose key is most like the query, and does not say how like."""

    def __init__(self, apart: float, context: Any) -> None:
        self.keys, self.context = torch.tensor([1.0 + apart, 1.0, 0.5]), context

    def select(self, layer: int, q: torch.Tensor) -> Selection:
        rows = (self.keys * q.flatten()).argmax().view(1, 1)
        return Selection(torch.ones(1, 1, 1, dtype=torch.bool), torch.full((1, 0), -1), rows=rows)


@dataclass
class NearWay:
    """Runs one call of it."""

    apart: float

    def run(self, ground: Any, sink: Any, choices: list[Choice], probe: Probe | None = None) -> None:
        context = cast(RunContext, SimpleNamespace(prompt_tokens=3, max_new=1))
        watched(cast(type[Method], Nearest), choices, probe)(self.apart, context).select(0, torch.ones(1, 3))


@pytest.mark.parametrize(("apart", "passes"), [(1e-7, True), (0.1, False)])
def test_without_scores_the_host_is_asked_with_its_query_moved(apart: float, passes: bool) -> None:
    way = cast(Way, NearWay(apart))
    host: list[Choice] = []
    way.run(cast(Ground, None), None, host)
    assert [choice.subject for choice in host] == ["spans fetched", "spans read", "tokens fetched"]
    ours = [*host[:2], Choice(0, 0, "tokens fetched", torch.tensor([[False, True, False, False]]))]
    verdict = tier._explained(compare(host, ours), way, cast(Ground, None), (host, ours))
    assert choice_row("m", verdict).passed is passes
    assert f"of {DRAWS} draws" in verdict.text


# a device


def test_what_is_noted_of_a_device_lies_on_the_host() -> None:
    """And nothing of it mixes the two (tests/fakecuda.py)."""
    with FakeCuda():
        positions = on_cuda(torch.tensor([[[0, 2, -1], [1, 2, 3]]]))
        kept = Kept(positions, on_cuda(torch.rand(1, 2, 5)))
        span = Span(0, 5, "page", "one")
        placed = _placed(Placement([span], ["partial"], ["resident"], kept, cold=kept), 5)
        fine, rows = on_cuda(torch.ones(2, 1, 3, dtype=torch.bool)), on_cuda(torch.tensor([[4, -1], [0, 1]]))
        blend = Blend(on_cuda(torch.ones(2, 1)), on_cuda(torch.ones(2, 4)), on_cuda(torch.rand(2, 1, 6)))
        selection = Selection(
            fine,
            on_cuda(torch.tensor([[2, -1], [0, 1]])),
            rows=rows,
            tokens=fine.long(),
            positions=on_cuda(torch.ones(2, 1, 6, dtype=torch.bool)),
            blend=blend,
            entries=on_cuda(torch.ones(2, 1, 4, dtype=torch.bool)),
            now=on_cuda(torch.tensor([True, False])),
            score=on_cuda(torch.rand(2, 3)),
        )
        chosen = _selected(selection, 0, 1, 6)
    assert [choice.subject for choice in placed] == ["spans", "kept", "cold"]
    assert placed[1].table.tolist() == [[True, False, True, False, False], [False, True, True, True, False]]
    assert len({choice.subject for choice in chosen}) == 7
    assert chosen[0].table.tolist() == [[False, False, True], [True, True, False]]
    found = [tensor for choice in (*placed, *chosen) for tensor in (choice.table, choice.score) if tensor is not None]
    assert len(found) == 16
    assert not any(tensor.is_cuda for tensor in found)
