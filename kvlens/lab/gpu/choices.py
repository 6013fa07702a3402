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

from kvlens.lab.gpu.verdicts import Choice, Verdict

if TYPE_CHECKING:
    from kvlens.memory.placement import Placement, Selection
    from kvlens.methods.base import Method

MOVED, DRAWS = 1e-5, 16
"""how far a query is moved, as a share of its own numbers, and how often, where a choice has no scores"""


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
                    request = method.select(copy.deepcopy(self), layer, moved)
                    probe.found.append(self.watched_choices(request, layer))
            selection = super().select(layer, q)
            into.extend(self.watched_choices(selection, layer))
            return selection

        def decode_end(self, end: Any, memory: Any) -> Any:
            change = super().decode_end(end, memory)
            self.watched_step = end.step + 1
            evicted = getattr(change, "evicted", None)
            if evicted is not None:
                removed = None if evicted.score is None else _host(evicted.score)
                into.extend(
                    Choice(
                        self.watched_step,
                        layer,
                        "evicted",
                        places[:, None],
                        None if removed is None else removed[layer, :, None],
                    )
                    for layer, places in enumerate(_host(evicted.places))
                )
            return change

    return Watched


def compare(host: Sequence[Choice], ours: Sequence[Choice]) -> Verdict:
    """Where the device's choices first differ from the host's."""
    for number, (item, two) in enumerate(zip(host, ours, strict=False)):
        if (item.step, item.layer, item.subject) != (two.step, two.layer, two.subject):
            return Verdict(f"{_place(item)}: the device chose {two.subject} there", None, item.step)
        if not torch.equal(item.table, two.table):
            return _judge_first(list(zip(host[number:], ours[number:], strict=False)))
    if len(host) != len(ours):
        return Verdict(f"{len(host)} choices on the host, {len(ours)} on the device", None, -1)
    return Verdict(f"all {len(host)} are equal")


def flips(choice: Choice, two: Choice, choices: Sequence[Sequence[Choice]]) -> int:
    """In how many draws the host, whose query was moved, chose otherwise where the device did."""
    differs = _differs(choice, two)
    again = [counterpart for draw in choices for counterpart in draw if counterpart.subject == choice.subject]
    return sum(
        bool((_differs(choice, counterpart) & differs).any()) for counterpart in again if _fit(choice, counterpart)
    )


def first_pair(host: Sequence[Choice], ours: Sequence[Choice]) -> tuple[Choice, Choice] | None:
    """The first choice that differs."""
    return next((pair for pair in zip(host, ours, strict=False) if not torch.equal(pair[0].table, pair[1].table)), None)


def _judge_first(rest: Sequence[tuple[Choice, Choice]]) -> Verdict:
    """The verdict on the first difference: of one layer, or, when the prompt is placed, of every layer, since all of
    them were chosen from what was read alike."""
    started_job = rest[0][0]
    sentences: list[tuple[float | None, str]] = []
    for item, two in rest:
        if item.step != started_job.step or (item.step >= 0 and item.layer != started_job.layer):
            break
        if not torch.equal(item.table, two.table):
            sentences += _heads(item, two)
    worst = max(sentences, key=lambda pair: float("inf") if pair[0] is None else pair[0])
    more = f", and {len(sentences) - 1} more of it" if len(sentences) > 1 else ""
    return Verdict(worst[1] + more, worst[0], started_job.step)


def _heads(choice: Choice, two: Choice) -> list[tuple[float | None, str]]:
    """(margin, words) of every KV head that differs."""
    if not _fit(choice, two):
        return [(None, f"{_place(choice)}: {tuple(choice.table.shape)} and {tuple(two.table.shape)} of them")]
    pairs: list[tuple[float | None, str]] = []
    for head in _differs(choice, two).flatten(1).any(1).nonzero().flatten().tolist():
        place = _place(choice) + (f" KV{head}" if len(choice.table) > 1 else "")
        margin = _margin(choice, two, head)
        if margin is None:
            pairs.append((None, f"{place}: no score says how close it was"))
        else:
            apart, size = margin
            pairs.append((apart / size, f"{place}: scores {apart:.2g} apart, of about {size:.4g}"))
    return pairs


def _margin(choice: Choice, two: Choice, head: int) -> tuple[float, float] | None:
    """(how close the scores were, their size): of what changed places, the host's lowest that it took from its highest
    that only the device took; where nothing changed places, how far the scores of what differs are from each other,
    between which the bound must lie. Their size is that of the largest of them, or the head's median where that is
    larger: the rounding of a sum near zero is that of what was added up. None: something that differs has no score."""
    if choice.score is None or two.score is None:
        return None
    a, b = choice.table[head].double(), two.table[head].double()
    own_rows, counterpart = (
        score[head if len(score) > 1 else 0].double().expand_as(a) for score in (choice.score, two.score)
    )
    used, remaining = a > b, a < b
    concerned = torch.cat((own_rows[used | remaining], counterpart[used | remaining]))
    if not concerned.isfinite().all():
        return None
    size = max(float(concerned.abs().max()), float(own_rows[own_rows.isfinite()].abs().quantile(0.5)))
    if used.any() and remaining.any() and choice.subject != "evicted":
        apart = abs(float(own_rows[used].min() - own_rows[remaining].max()))
    else:
        apart = float((own_rows - counterpart)[used | remaining].abs().max())
    return (apart, size) if size else None


def _placed(placement: Placement, tokens: int) -> list[Choice]:
    starts = torch.tensor([[span.tok_start for span in placement.spans]])
    choices = [Choice(-1, None, "spans", starts)]
    for subject, kept_tokens in (("kept", placement.kept), ("cold", placement.cold)):
        if kept_tokens is None:
            continue
        mask, score = (
            _host(kept_tokens.mask(tokens)),
            None if kept_tokens.score is None else _host(kept_tokens.score[..., :tokens]),
        )
        for layer in range(len(mask)):
            total = None if score is None else score[layer if len(score) > 1 else 0]
            choices.append(Choice(-1, layer if len(mask) > 1 else None, subject, mask[layer], total))
    return choices


def _selected(selection: Selection, step: int, layer: int, tokens: int) -> list[Choice]:
    """Spans that are fetched and read, single tokens, and who waits for them. tokens: of the whole run."""
    score = None if selection.score is None else _host(selection.score)
    wide = None if score is None else score[:, None]
    fine = _host(selection.fine)
    choices = [
        Choice(step, layer, "spans fetched", _marked(_host(selection.requested), fine.shape[-1]), score),
        Choice(step, layer, "spans read", fine, wide),
    ]
    if selection.tokens is not None:
        choices.append(Choice(step, layer, "tokens of spans read", _host(selection.tokens), wide))
    if selection.rows is not None:
        choices.append(Choice(step, layer, "tokens fetched", _marked(_host(selection.rows), tokens)))
    if selection.positions is not None:
        weights = None if selection.blend is None else _host(selection.blend.weights)
        choices.append(Choice(step, layer, "tokens read", _host(selection.positions), weights))
    if selection.entries is not None:
        choices.append(Choice(step, layer, "entries read", _host(selection.entries)))
    if selection.now is not None:
        choices.append(Choice(step, layer, "KV heads that wait", _host(selection.now)[:, None]))
    return choices


def _marked(ids: torch.Tensor, size: int) -> torch.Tensor:
    """bool [H_kv, size] of ids [H_kv, W], -1: none."""
    marks = torch.zeros(len(ids), size + 1, dtype=torch.bool)
    return marks.scatter_(1, torch.where(ids < 0, size, ids), True)[:, :size]


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()


def _fit(choice: Choice, two: Choice) -> bool:
    return choice.table.shape == two.table.shape


def _differs(choice: Choice, two: Choice) -> torch.Tensor:
    return choice.table != two.table


def _place(choice: Choice) -> str:
    when = "when the prompt was placed" if choice.step < 0 else f"at step {choice.step}"
    return f"{choice.subject} {when}" + ("" if choice.layer is None else f", L{choice.layer}")
