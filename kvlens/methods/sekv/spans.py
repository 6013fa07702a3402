"""How SeKV cuts a token range, with the switches of its parameters; shared by decoding and by training of the
router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from kvlens.methods.sekv.params import SeKVParameters
from kvlens.spans import Span, Surprisal, entropy_feasible, entropy_paper, fixed_chunks

COMPRESSED = ("entropy", "chunk")
"""Kinds of spans that are summarised and offloaded; the others ('sink', 'anchor', 'short') stay on the device as they
are."""


def segment(
    params: SeKVParameters, nats: Sequence[float], start: int, stats: Surprisal, anchor_cap: int | None = None
) -> list[Span]:
    """Spans of the tokens start..start+N, whose surprisals are `nats` [N]; anchor_cap holds for the feasible rule."""
    if params.segmentation == "chunks":
        first_token = min(max(start, params.sinks), start + len(nats))
        sinks = [Span(start, first_token, "sink", "The first tokens are always kept.")] if first_token > start else []
        return sinks + fixed_chunks(first_token, start + len(nats), params.l_max)
    if params.segmentation == "paper":
        spans = entropy_paper(nats, params.alpha, params.l_min, start=start, stats=stats, sinks=params.sinks)
    else:
        spans = entropy_feasible(
            nats, params.alpha, params.l_min, params.l_max, anchor_cap, start=start, stats=stats, sinks=params.sinks
        )
    return spans if params.anchors else _without_anchors(spans, params.l_min)


def piece_count(tokens: int, piece: int) -> int:
    """Pieces of a span; piece: tokens that one has at most, 0: the span is one piece."""
    return -(-tokens // piece) if piece else 1


def pieces(start: int, end: int, piece: int) -> list[tuple[int, int]]:
    """A span's ranges [start, end) as even as can be."""
    count = piece_count(end - start, piece)
    cuts = [start + (end - start) * i // count for i in range(count + 1)]
    return list(pairwise(cuts))


def _without_anchors(spans: list[Span], l_min: int) -> list[Span]:
    """Every run of anchors opens the span after it (or closes the one before it); the cuts stay where they are."""
    out: list[Span] = []
    carried: Span | None = None
    for span in spans:
        if span.kind == "anchor":
            carried = span
            continue
        if carried is not None:
            span = replace(
                span, tok_start=carried.tok_start, reason=f"{span.reason} Opens with what would be an anchor."
            )
            carried = None
        kind = "entropy" if span.kind == "short" and len(span) >= l_min else span.kind
        out.append(replace(span, kind=kind))
    if carried is not None:
        if out and out[-1].kind != "sink":
            last = replace(out.pop(), tok_end=carried.tok_end)
        else:
            last = carried
        out.append(replace(last, kind="entropy" if len(last) >= l_min else "short"))
    return out
