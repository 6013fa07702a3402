"""The story that the first page plays: a recorded loss of the gallery and its repair, step by step, as one KV head had
its spans. `story.json` beside this file is made from the two runs of one loss (`benchmarks/gallery.py`)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pandas as pd
from pydantic import BaseModel, ConfigDict

from kvlens.app import gallery
from kvlens.lens.condition import condition
from kvlens.lens.verdict import Missed, verdict
from kvlens.rows import SPAN_STATES
from kvlens.store.errors import TraceError
from kvlens.store.reader import TraceReader
from kvlens.text.passages import passage

FILE = Path(__file__).with_name("story.json")
QUOTED = 60
"""characters of the span's text"""


class Scene(BaseModel):
    """One run, step by step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: tuple[str, ...]
    """what each step wrote"""
    spans: tuple[tuple[tuple[int, int, int], ...], ...]
    """of each step: (start, end, index into SPAN_STATES) of every span of the KV head"""
    hole: tuple[float, ...]
    """of each step: the share of full KV's attention on the missed span that the run did not give it; 0 where the span
    was resident"""


class Story(BaseModel):
    """A loss, and the same run with what was missed held."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str
    uid: str
    condition: str
    question: str
    expected: str
    layer: int
    kv_head: int
    start: int
    end: int
    """tokens [start, end) of the span that was missed most"""
    text: str
    needle: tuple[int, int]
    prompt: int
    """tokens of the prompt"""
    held: str
    """what was held, in words"""
    held_bytes: int
    held_from: int
    """the first step of the hold; before it both runs are one"""
    lost: Scene
    repaired: Scene


@cache
def story() -> Story:
    """The story that comes with this kvlens."""
    return Story.model_validate(json.loads(FILE.read_text(encoding="utf-8")))


def story_of(loss: gallery.Loss, runs: Path) -> Story:
    """Return the story of a loss from its two runs in the folder `runs`. Raises TraceError where they lack it."""
    with TraceReader.open(runs, loss.uid) as reader, TraceReader.open(runs, loss.held.uid) as repaired:
        loss_verdict = verdict(reader)
        if loss_verdict is None or loss_verdict.missed is None:
            raise TraceError(f"Run {loss.uid} has no loss with a missed span.")
        missed, tokens = loss_verdict.missed, reader.tokens()
        text = " ".join(passage(tokens, missed.tok_start, missed.tok_end).split())
        needle = _needle(reader)
        lost, held = _scene(reader, missed), _scene(repaired, missed)
        held_from = min(hold.from_step for hold in repaired.meta.hold)
        return Story(
            method=loss.method,
            uid=loss.uid,
            condition=condition([reader]),
            question=loss.question,
            expected=loss.expected,
            layer=missed.layer,
            kv_head=missed.kv_head,
            start=missed.tok_start,
            end=missed.tok_end,
            text=text if len(text) <= QUOTED else f"{text[:QUOTED].rstrip()}…",
            needle=needle,
            prompt=loss.prompt_tokens,
            held=loss.held.words,
            held_bytes=loss.held.bytes,
            held_from=held_from,
            lost=lost,
            # the held run stores no full attention; before the hold it is the lost run
            repaired=held.model_copy(update={"hole": lost.hole[:held_from] + held.hole[held_from:]}),
        )


def _needle(reader: TraceReader) -> tuple[int, int]:
    """The tokens [start, end) that hold the asked fact; (0, 0) where none is known."""
    tokens, ranges = reader.tokens(), reader.meta.needle
    if not ranges:
        return 0, 0
    start, end = ranges[0]
    inside = tokens.loc[(tokens["char_start"] < end) & (tokens["char_end"] > start), "pos"]
    return int(inside.min()), int(inside.max()) + 1


def _scene(reader: TraceReader, missed: Missed) -> Scene:
    changes = reader.state_changes(missed.layer, missed.kv_head)
    spans = reader.spans()
    tokens = reader.tokens()
    written = tokens[tokens["step"].notna()].sort_values("step")
    steps = range(reader.n_steps)
    states = [_states(spans, changes, step, reader.prompt_tokens() + step) for step in steps]
    holes = [_hole(reader, missed, step, state) for step, state in zip(steps, states, strict=True)]
    return Scene(tokens=tuple(map(str, written["text"])), spans=tuple(states), hole=tuple(holes))


def _states(spans: pd.DataFrame, changes: pd.DataFrame, step: int, end: int) -> tuple[tuple[int, int, int], ...]:
    """The spans that there are at a step, windows first: others are laid over them. end: positions written."""
    latest = changes[changes["step"] <= step].drop_duplicates("span", keep="last").set_index("span")["state"]
    living = spans[(spans["born_step"] <= step) & ~(spans["died_step"] <= step)]
    ordered = living.sort_values("kind", key=lambda kinds: kinds != "window", kind="stable")
    columns = [ordered[name].tolist() for name in ("span", "kind", "tok_start", "tok_end")]
    rows = [
        (int(start), end if kind == "window" else min(int(stop), end), str(latest.get(span)))
        for span, kind, start, stop in zip(*columns, strict=True)
    ]
    return tuple((start, stop, SPAN_STATES.index(state)) for start, stop, state in rows if state in SPAN_STATES)


def _hole(reader: TraceReader, missed: Missed, step: int, states: tuple[tuple[int, int, int], ...]) -> float:
    """What of full KV's attention on the missed span the run did not give it at a step."""
    resident = SPAN_STATES.index("resident")
    if (missed.tok_start, missed.tok_end, resident) in states or not reader.meta.sampled:
        return 0.0
    triples = reader.triples(step)
    row = triples[
        (triples["layer"] == missed.layer) & (triples["kv_head"] == missed.kv_head) & (triples["span"] == missed.span)
    ]
    return round(float(row["regret"].iloc[0]), 3) if len(row) else 0.0
