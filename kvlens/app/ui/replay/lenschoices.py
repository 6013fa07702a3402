"""What of a run may be held or dropped, in words: the selected span, what had most effect on the choice, what was lost
inside the span, the needle, what was missed most."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from kvlens.app.ui.common.data import TraceReader
from kvlens.holds import joined
from kvlens.lens.lines import inside, ranges_in_words, ranked
from kvlens.lens.pieces import Piece
from kvlens.lens.verdict import Verdict
from kvlens.player.payload import needle_tokens

MOST = 5
"""things of most effect, or missed most, that are offered together"""


def choices_of(reader: TraceReader, span: int | None, loss: Verdict | None) -> dict[str, tuple[Piece, ...]]:
    """What is offered, by its words: the span, where one is chosen; where the verdict names that one, what comes first
    in the ranking of effects, each for the KV head that missed it; the needle's spans where the span is not all of it;
    of a run that lost, the tokens lost inside the span and the lines missed most, spans and tokens lost inside spans.
    loss: None of a run that lost nothing, or of which that is not known."""
    step = reader.n_steps - 1 if loss is None else loss.step
    choices: dict[str, tuple[Piece, ...]] = {}
    spans = reader.spans()
    if span is not None and span not in set(spans.loc[spans["kind"] == "window", "span"]):
        choices[f"span {span}"] = (Piece(span),)
    if loss is not None and loss.missed is not None and loss.missed.span == span:
        choices |= _of_most_effect(reader, step)
    lost = [] if loss is None else inside(reader, step)
    for line in lost:
        if line.span == span or line is lost[0]:
            choices[line.words()] = _pieces(tokens=line.tokens)
    alive = spans[(spans["kind"] != "window") & (spans["born_step"] <= step) & ~(spans["died_step"] <= step)]
    needle = needle_tokens(reader.tokens(), reader.meta.needle)
    inner = [
        int(s)
        for s, start, end in zip(alive["span"], alive["tok_start"], alive["tok_end"], strict=True)
        if any(a < end and b > start for a, b in needle)
    ]
    if inner and inner != [span]:
        choices[f"the needle: {len(inner)} span{'s' if len(inner) > 1 else ''}"] = _pieces(inner)
    most, tokens = ([], ()) if loss is None else _most_missed(reader, step)
    if len(most) + len(tokens) > 1:
        label = f"the {len(most)} spans missed most"
        choices[label + (f" and {ranges_in_words(tokens)}" if tokens else "")] = _pieces(most, tokens)
    return choices


def _of_most_effect(reader: TraceReader, step: int) -> dict[str, tuple[Piece, ...]]:
    """The first by effect on the choice, each for its KV head; {} where no effects were recorded."""
    window = set(reader.spans().query("kind == 'window'")["span"])
    lines = [line for line in ranked(reader, (step,)) if line.effect > 0 and (line.tokens or line.span not in window)]
    pieces = [
        replace(piece, layer=line.layer, kv_head=line.kv_head)
        for line in lines[:MOST]
        for piece in (_pieces(tokens=line.tokens) or _pieces([line.span]))
    ]
    label = f"the first {len(lines[:MOST])} lines of the ranking (one KV head and span each)"
    return {label: tuple(pieces)} if len(lines) > 1 else {}


def _most_missed(reader: TraceReader, step: int, most: int = MOST) -> tuple[list[int], tuple[tuple[int, int], ...]]:
    """The spans and ranges of tokens of the lines missed most, which may name one of them for several KV heads."""
    spans: dict[int, None] = {}
    tokens: tuple[tuple[int, int], ...] = ()
    window = set(reader.spans().query("kind == 'window'")["span"])
    for line in ranked(reader, (step,)):
        if line.tokens:
            tokens = joined((*tokens, *line.tokens))
        elif line.span not in window:
            spans[line.span] = None
        if len(spans) + len(tokens) >= most:
            break
    return list(spans), tokens


def _pieces(spans: Iterable[int] = (), tokens: Iterable[tuple[int, int]] = ()) -> tuple[Piece, ...]:
    return (*(Piece(span) for span in spans), *(Piece(tokens=token_range) for token_range in tokens))
