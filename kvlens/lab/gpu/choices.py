"""What a method chose, call by call, on the host and on the device; where the two differ first, and whether that is a
tie.

Two devices round differently, so that of two things whose scores are equal but for rounding each may take another one.
Such a tie is named with its place and its margin. What follows one is not compared: the runs attend other tokens from
there on.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kvlens.memory.placement import Placement, Selection
    from kvlens.methods.base import Method

TIE = 1e-4
"""scores that lie closer than this share of themselves, or of the head's median one, are equal but for rounding
(fp32)"""
MOVED, DRAWS = 1e-5, 16
"""how far a query is moved, as a share of its own numbers, and how often, where a choice has no scores"""


@dataclass(frozen=True)
class Choice:
    """What one call came to. step -1: when the prompt was placed; layer None: alike in all layers."""

    step: int
    layer: int | None
    what: str
    chosen: torch.Tensor
    """[H_kv|1, ..., N], bool or numbers"""
    score: torch.Tensor | None = None
    """by what it was chosen, of a shape that goes with it; NaN: not by that"""


@dataclass(frozen=True)
class Verdict:
    """How far two runs chose alike. margin: of the first difference, as a share of the scores; 0: none differs; None:
    nothing says how close it was."""

    text: str
    margin: float | None = 0.0
    step: int | None = None
    """of the first difference"""

    @property
    def equal(self) -> bool:
        return self.step is None

    @property
    def tie(self) -> bool:
        return not self.equal and self.margin is not None and self.margin <= TIE


@dataclass(frozen=True)
class Probe:
    """Ask a method again at one step and layer, with queries that are moved a little."""

    step: int
    layer: int
    found: list[list[Choice]]


def watched(method: type[Method], into: list[Choice], probe: Probe | None = None) -> type[Method]:
    """The same method, whose choices are noted; it chooses as before."""

    class Watched(method):  # type: ignore[misc, valid-type]
        watched_step = 0

        def watched_choices(self, selection: Selection | None, layer: int) -> list[Choice]:
            tokens = self.context.prompt_tokens + self.context.max_new
            return [] if selection is None else _selected(selection, self.watched_step, layer, tokens)

        def prefill_end(self, prompt: Any) -> Any:
            layout, placement = super().prefill_end(prompt)
            into.extend(_placed(placement, self.context.prompt_tokens))
            return layout, placement

        def select(self, layer: int, q: torch.Tensor) -> Selection | None:
            if probe is not None and (probe.step, probe.layer) == (self.watched_step, layer):
                for seed in range(DRAWS):
                    noise = torch.randn(q.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
                    moved = (q.double() * (1 + MOVED * noise.to(q.device))).to(q.dtype)
                    asked = method.select(copy.deepcopy(self), layer, moved)
                    probe.found.append(self.watched_choices(asked, layer))
            selection = super().select(layer, q)
            into.extend(self.watched_choices(selection, layer))
            return selection

        def decode_end(self, end: Any, memory: Any) -> Any:
            change = super().decode_end(end, memory)
            self.watched_step = end.step + 1
            evicted = getattr(change, "evicted", None)
            if evicted is not None:
                gone = None if evicted.score is None else _host(evicted.score)
                into.extend(
                    Choice(
                        self.watched_step,
                        layer,
                        "evicted",
                        places[:, None],
                        None if gone is None else gone[layer, :, None],
                    )
                    for layer, places in enumerate(_host(evicted.places))
                )
            return change

    return Watched


def compare(host: Sequence[Choice], ours: Sequence[Choice]) -> Verdict:
    """Where the device's choices first differ from the host's."""
    for number, (one, two) in enumerate(zip(host, ours, strict=False)):
        if (one.step, one.layer, one.what) != (two.step, two.layer, two.what):
            return Verdict(f"{_place(one)}: the device chose {two.what} there", None, one.step)
        if not torch.equal(one.chosen, two.chosen):
            return _first(list(zip(host[number:], ours[number:], strict=False)))
    if len(host) != len(ours):
        return Verdict(f"{len(host)} choices on the host, {len(ours)} on the device", None, -1)
    return Verdict(f"all {len(host)} are equal")


def flips(one: Choice, two: Choice, found: Sequence[Sequence[Choice]]) -> int:
    """In how many draws the host, whose query was moved, chose otherwise where the device did."""
    differs = _differs(one, two)
    again = [other for draw in found for other in draw if other.what == one.what]
    return sum(bool((_differs(one, other) & differs).any()) for other in again if _fit(one, other))


def first_pair(host: Sequence[Choice], ours: Sequence[Choice]) -> tuple[Choice, Choice] | None:
    """The first choice that differs."""
    return next(
        (pair for pair in zip(host, ours, strict=False) if not torch.equal(pair[0].chosen, pair[1].chosen)), None
    )


def _first(rest: Sequence[tuple[Choice, Choice]]) -> Verdict:
    """The verdict on the first difference: of one layer, or, when the prompt is placed, of every layer, since all of
    them were chosen from what was read alike."""
    begun = rest[0][0]
    told: list[tuple[float | None, str]] = []
    for one, two in rest:
        if one.step != begun.step or (one.step >= 0 and one.layer != begun.layer):
            break
        if not torch.equal(one.chosen, two.chosen):
            told += _heads(one, two)
    worst = max(told, key=lambda pair: float("inf") if pair[0] is None else pair[0])
    more = f", and {len(told) - 1} more of it" if len(told) > 1 else ""
    return Verdict(worst[1] + more, worst[0], begun.step)


def _heads(one: Choice, two: Choice) -> list[tuple[float | None, str]]:
    """(margin, words) of every KV head that differs."""
    if not _fit(one, two):
        return [(None, f"{_place(one)}: {tuple(one.chosen.shape)} and {tuple(two.chosen.shape)} of them")]
    found: list[tuple[float | None, str]] = []
    for head in _differs(one, two).flatten(1).any(1).nonzero().flatten().tolist():
        place = _place(one) + (f" KV{head}" if len(one.chosen) > 1 else "")
        margin = _margin(one, two, head)
        if margin is None:
            found.append((None, f"{place}: no score says how close it was"))
        else:
            apart, size = margin
            found.append((apart / size, f"{place}: scores {apart:.2g} apart, of about {size:.4g}"))
    return found


def _margin(one: Choice, two: Choice, head: int) -> tuple[float, float] | None:
    """(how close the scores were, their size): of what changed places, the host's lowest that it took from its highest
    that only the device took; where nothing changed places, how far the scores of what differs are from each other,
    between which the bound must lie. Their size is that of the largest of them, or the head's median where that is
    larger: the rounding of a sum near zero is that of what was added up. None: something that differs has no score."""
    if one.score is None or two.score is None:
        return None
    a, b = one.chosen[head].double(), two.chosen[head].double()
    mine, other = (score[head if len(score) > 1 else 0].double().expand_as(a) for score in (one.score, two.score))
    taken, left = a > b, a < b
    concerned = torch.cat((mine[taken | left], other[taken | left]))
    if not concerned.isfinite().all():
        return None
    size = max(float(concerned.abs().max()), float(mine[mine.isfinite()].abs().quantile(0.5)))
    if taken.any() and left.any() and one.what != "evicted":
        apart = abs(float(mine[taken].min() - mine[left].max()))
    else:
        apart = float((mine - other)[taken | left].abs().max())
    return (apart, size) if size else None


def _placed(placement: Placement, tokens: int) -> list[Choice]:
    starts = torch.tensor([[span.tok_start for span in placement.spans]])
    found = [Choice(-1, None, "spans", starts)]
    for what, kept in (("kept", placement.kept), ("cold", placement.cold)):
        if kept is None:
            continue
        mask, score = _host(kept.mask(tokens)), None if kept.score is None else _host(kept.score[..., :tokens])
        for layer in range(len(mask)):
            of = None if score is None else score[layer if len(score) > 1 else 0]
            found.append(Choice(-1, layer if len(mask) > 1 else None, what, mask[layer], of))
    return found


def _selected(selection: Selection, step: int, layer: int, tokens: int) -> list[Choice]:
    """Spans that are fetched and read, single tokens, and who waits for them. tokens: of the whole run."""
    score = None if selection.score is None else _host(selection.score)
    wide = None if score is None else score[:, None]
    fine = _host(selection.fine)
    found = [
        Choice(step, layer, "spans fetched", _marked(_host(selection.requested), fine.shape[-1]), score),
        Choice(step, layer, "spans read", fine, wide),
    ]
    if selection.tokens is not None:
        found.append(Choice(step, layer, "tokens of spans read", _host(selection.tokens), wide))
    if selection.rows is not None:
        found.append(Choice(step, layer, "tokens fetched", _marked(_host(selection.rows), tokens)))
    if selection.positions is not None:
        weights = None if selection.blend is None else _host(selection.blend.weights)
        found.append(Choice(step, layer, "tokens read", _host(selection.positions), weights))
    if selection.now is not None:
        found.append(Choice(step, layer, "KV heads that wait", _host(selection.now)[:, None]))
    return found


def _marked(ids: torch.Tensor, size: int) -> torch.Tensor:
    """bool [H_kv, size] of ids [H_kv, W], -1: none."""
    marks = torch.zeros(len(ids), size + 1, dtype=torch.bool)
    return marks.scatter_(1, torch.where(ids < 0, size, ids), True)[:, :size]


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()


def _fit(one: Choice, two: Choice) -> bool:
    return one.chosen.shape == two.chosen.shape


def _differs(one: Choice, two: Choice) -> torch.Tensor:
    return one.chosen != two.chosen


def _place(choice: Choice) -> str:
    when = "when the prompt was placed" if choice.step < 0 else f"at step {choice.step}"
    return f"{choice.what} {when}" + ("" if choice.layer is None else f", L{choice.layer}")
