"""The loss ledger: its parts add up, and each cause arises for a run that was made to have it."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import support
import torch

from kvlens import tasks
from kvlens.budget import Budget
from kvlens.engine.comparison import Reference
from kvlens.engine.engine import Engine, Options
from kvlens.engine.models import load
from kvlens.holds import Drop
from kvlens.instruments import CutRow, Oracle, Scores
from kvlens.ledger.account import LossLedger, Share, split
from kvlens.ledger.causes import CODES, INDEX, REST
from kvlens.ledger.classify import Causes, classify, decided
from kvlens.ledger.frontier import find_frontier
from kvlens.ledger.measure import Measure, NothingLost
from kvlens.ledger.ofrun import measure_ledger
from kvlens.ledger.pooled import pooled
from kvlens.ledger.signals import signals_of, varentropy
from kvlens.ledger.storage import FILE, stored_ledger
from kvlens.ledger.story import Story
from kvlens.ledger.tracks import track_of
from kvlens.lens.trials import Trials
from kvlens.methods import make_parameters
from kvlens.records import PrefillRecord, StepRecord
from kvlens.rows import EventRow, SpanRow
from kvlens.runs.answerend import answer_end
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.shape import KVShape
from kvlens.store.reader import TraceReader
from kvlens.tasks.encoding import encoding_of
from kvlens.text.prompts import tokenize

SHAPE = KVShape(1, 2, 1, 4, 4)
"""one layer, two query heads, one KV head"""


# ---- the split
def test_shapley_values_are_means_over_all_orders_and_add_up() -> None:
    worth = {"": 0.0, "a": 1.0, "b": 2.0, "c": 0.0, "ab": 5.0, "ac": 1.5, "bc": 2.0, "abc": 9.0}

    def value(players: frozenset[str]) -> float:
        return worth["".join(sorted(players))]

    by_hand = dict.fromkeys("abc", 0.0)
    for order in permutations("abc"):
        for place, player in enumerate(order):
            before = frozenset(order[:place])
            by_hand[player] += (value(before | {player}) - value(before)) / 6
    found = split(("a", "b", "c"), value)
    assert found == pytest.approx(by_hand)
    assert sum(found.values()) == pytest.approx(9.0)


# ---- causes, of a story made by hand: span 1 is missed, span 2 is read
def step(number: int, wanted: tuple[int, ...] | None, unread: float, **more: Any) -> StepRecord:
    full = np.full((1, 2, 1), 0.5, np.float32)
    oracle = Oracle(
        np.ones((1, 2, 1), np.int32),
        full,
        (full - unread).clip(0),
        np.zeros((1, 2), np.float32),
        np.full((1, 2, 1), unread, np.float32),
    )
    span = np.full((1, 1, 2), -1, np.int32)
    chosen = np.zeros((1, 1, 2), bool)
    for place, name in enumerate(wanted or ()):
        span[0, 0, place], chosen[0, 0, place] = name, True
    scores = Scores(span, np.zeros((1, 1, 2), np.float32), chosen, np.full((1, 1), 2, np.int32))
    empty = np.zeros((1, 2, 0), np.float32)
    return StepRecord(
        **{"head": {}, "kv": {}, **more},
        step=number,
        t_us=0,
        dur_us=1,
        wait_us=0,
        record_us=0,
        token_id=0,
        text="",
        logprob=None,
        next_entropy=1.0,
        resident_bytes=0,
        peak_bytes=0,
        cold_bytes=0,
        top_span=empty.astype(np.int32),
        top_mass=empty,
        tail_mass=np.zeros((1, 2), np.float32),
        scores=None if wanted is None else scores,
        oracle=oracle,
    )


def prefill(state: str, cuts: list[CutRow] | None = None) -> PrefillRecord:
    return PrefillRecord(
        tokens=[],
        spans=[
            SpanRow(0, "window", 8, 9, -1, ""),
            SpanRow(1, "page", 0, 4, -1, "", None, state),
            SpanRow(2, "page", 4, 8, -1, ""),
        ],
        span_heads=[],
        transfers=[],
        events=[],
        prefill_us=0,
        prefill_peak_bytes=0,
        cold_bytes=0,
        resident_bytes=0,
        cuts=cuts or [],
    )


def causes(state: str, steps: list[StepRecord], question: int = 0, waits: bool = False) -> Causes:
    story = Story(SHAPE)
    story.prefill(prefill(state))
    for record in steps:
        story.step(record)
    return classify(story, question, waits)


def event(number: int, kind: str, after: bool = False) -> EventRow:
    return EventRow(number, 0, 0, None, kind, 1, None, after)


UNCORRECTED = {"head": {"corrected": np.zeros((1, 2))}, "kv": {"similarity": np.full((1, 1), 0.95)}}
MADE: dict[str, tuple[str, list[StepRecord], int]] = {
    "not_asked": ("cold", [step(0, (2,), 0.5)], 0),
    "refused": ("cold", [step(0, (1, 2), 0.5, events=[event(0, "refused")])], 0),
    "precision": ("quantised", [step(0, None, 0.0)], 0),
    "stale": ("cold", [step(0, (2,), 0.0), step(1, (1, 2), 0.5, **UNCORRECTED)], 0),
    "evicted_before": ("evicted", [step(0, None, 0.5), step(1, None, 0.5)], 2),
    "evicted_after": ("partial", [step(0, None, 0.5)], 0),
}


def test_a_story_was_made_for_every_cause() -> None:
    assert tuple(MADE) == CODES


@pytest.mark.parametrize("cause", CODES)
def test_a_span_gets_the_cause_it_was_made_to_have(cause: str) -> None:
    state, steps, question = MADE[cause]
    found = causes(state, steps, question)
    assert found.cause_of[0, 0, 1] == INDEX[cause]
    assert found.triples(cause)[0] == (0, 0, 1)
    assert found.holds(frozenset((cause,)))[0].span == 1


def test_a_summary_is_routing_where_queries_rank_and_precision_where_none_does() -> None:
    assert causes("coarse", [step(0, (2,), 0.5)]).cause_of[0, 0, 1] == INDEX["not_asked"]
    assert causes("coarse", [step(0, None, 0.5)]).cause_of[0, 0, 1] == INDEX["precision"]


def test_what_is_evicted_behind_the_question_is_no_early_eviction() -> None:
    late = [step(0, None, 0.0), step(1, None, 0.0, events=[event(1, "evict")]), step(2, None, 0.5)]
    assert causes("resident", late, question=1).cause_of[0, 0, 1] == INDEX["evicted_after"]
    early = [step(0, None, 0.0, events=[event(0, "evict")]), step(1, None, 0.5)]
    assert causes("resident", early, question=1).cause_of[0, 0, 1] == INDEX["evicted_before"]


def test_recorded_decisions_name_refused_and_late_spans_of_all_heads_they_speak_for() -> None:
    decisions = SimpleNamespace(
        layer=np.array([0, -1]),
        kv_head=np.array([0, -1]),
        refused=np.array([1, 0]),
        missed=np.array([0, 2]),
        refused_span=np.array([1]),
        missed_span=np.array([0, 2]),
    )
    story = Story(SHAPE)
    story.prefill(prefill("cold"))
    record: Any = SimpleNamespace(decisions=decisions)
    assert np.argwhere(decided(record, story, "refused")).tolist() == [[0, 0, 1]]
    assert np.argwhere(decided(record, story, "missed")).tolist() == [[0, 0, 0], [0, 0, 2]]
    assert not decided(step(0, None, 0.0), story, "refused").any()


def test_the_cause_of_most_unread_mass_counts() -> None:
    mixed = [step(0, (2,), 0.1), step(1, (1,), 0.5, events=[event(1, "refused")])]
    assert causes("cold", mixed).cause_of[0, 0, 1] == INDEX["refused"]


def test_holds_of_all_causes_cover_every_token_that_was_not_read() -> None:
    found = causes("evicted", [step(0, None, 0.5)])
    assert [(hold.tok_start, hold.tok_end) for hold in found.holds(frozenset(found.active))] == [(0, 4)]


# ---- whole ledgers on the demo model
def trials_of(method: str, budget: str, question: str = "in", **changes: Any) -> tuple[Trials, int]:
    engine = Engine(load("demo"))
    loaded = engine.loaded
    made = tasks.ask(tasks.get("multikey"), 512, 0.5, 3, encoding_of(loaded.tokenizer))
    prompt = tokenize(tasks.prompt_of(made), loaded.tokenizer, loaded.max_positions, 24, question=question)
    options = Options(max_new=24)
    full = engine.run(prompt, *_full(), None, options, keep_logits=True)
    reference = Reference("", tuple(full.ids), torch.stack(full.logits))
    kind = support.method_of(method)
    params = make_parameters(kind, None, changes)
    trials = Trials(engine, prompt, kind, params, Budget.parse(budget), options, reference)
    return trials, answer_end(engine.loaded, prompt, reference, len(prompt.asked), True)


def _full() -> tuple[Any, Any]:
    full = support.method_of("full")
    return full, make_parameters(full, None, {})


@pytest.mark.parametrize(
    ("method", "budget", "question", "changes", "cause"),
    [
        ("streaming_llm", "12%", "in", {}, "evicted_after"),
        ("streaming_llm", "12%", "after", {}, "evicted_before"),
        ("quest", "100%", "in", {"keep": 0.12}, "not_asked"),
        ("sentencekv", "40%", "in", {}, "not_asked"),
    ],
)
def test_a_ledger_adds_up_and_its_largest_cause_brings_the_answer_back(
    method: str, budget: str, question: str, changes: dict[str, Any], cause: str
) -> None:
    trials, end = trials_of(method, budget, question, **changes)
    ledger = Measure(trials, end).account()
    assert ledger.lost == pytest.approx(sum(share.logits for share in ledger.shares) + ledger.rest, abs=1e-3)
    assert abs(ledger.rest) <= 0.05 * ledger.lost
    assert ledger.largest is not None
    assert (ledger.largest.cause, ledger.largest.restored) == (cause, True)
    assert ledger.lead_full > 0 > ledger.lead_run


def test_what_full_kv_keeps_has_no_ledger() -> None:
    trials, end = trials_of("full", "100%")
    with pytest.raises(NothingLost):
        Measure(trials, end)


def test_the_frontier_keeps_the_answer_with_fewer_bytes_than_full_kv() -> None:
    trials, end = trials_of("full", "100%")
    tried: list[tuple[Drop, ...]] = []

    def full(drops: tuple[Drop, ...]) -> Trials:
        tried.append(drops)
        return Trials(trials.engine, trials.prompt, *_full(), None, trials.options, trials.reference, drops=drops)

    frontier = find_frontier(full, end)
    assert len(tried) == frontier.tried + 1
    assert 0 < frontier.resident_bytes < 0.5 * frontier.full_bytes
    assert frontier.distance(2 * frontier.resident_bytes) == 2


def test_a_stored_runs_ledger_is_kept_beside_it(tmp_path: Path) -> None:
    engine = load("demo")
    prompt, _ = support.task_prompt(engine, "multikey", 512, 0.5, 3)
    request = RunRequest(model="demo", method="streaming_llm", budget="12%", max_new=24, against=True)
    uid = carry_out(request, prompt.source, tmp_path, lambda *_: None, lambda: False)[0]
    assert stored_ledger(tmp_path, uid) is None
    heard: list[tuple[str, int, int]] = []
    ledger, frontier = measure_ledger(tmp_path, uid, lambda *told: heard.append(told))
    assert frontier is None
    assert stored_ledger(tmp_path, uid) == (ledger, None)
    assert any(phase == "ledger" for phase, _, _ in heard)
    with TraceReader.open(tmp_path, uid) as reader:
        track = track_of(reader)
    assert track[-1]["lost"]
    assert all(row["entropy"] is not None for row in track)
    (tmp_path / uid / FILE).write_text('{"format": 0}')
    assert stored_ledger(tmp_path, uid) is None


# ---- many ledgers, and signals
def test_pooled_shares_of_a_label_add_up_to_one() -> None:
    shares = (Share("stale", 3.0, 3.0, 1, 0.1, None), Share("refused", -1.0, -1.0, 1, 0.1, None))
    one = LossLedger((0,), 5.0, -5.0, shares, 8.0, 4, 0.0)
    other = LossLedger((0,), 1.0, -1.0, (Share("stale", 2.0, 2.0, 1, 0.1, None),), 0.0, 2, 0.0)
    frame = pooled([("a", one), ("a", other), ("b", other)])
    assert frame.groupby("label")["share"].sum().to_dict() == pytest.approx({"a": 1.0, "b": 1.0})
    assert frame.set_index(["label", "cause"]).loc[("a", REST), "share"] == pytest.approx(0.4)


def test_signals_that_were_not_recorded_are_none() -> None:
    told = signals_of(step(0, None, 0.0))
    assert told == {"entropy": 1.0, "varentropy": None, "query_change": None, "fetched": None, "unread": None}
    assert varentropy(np.zeros(8)) == pytest.approx(0.0)

    class Elsewhere:
        """A tensor on a device that numpy cannot read."""

        def __array__(self, dtype: object = None) -> np.ndarray:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

        def cpu(self) -> np.ndarray:
            return np.zeros(8, np.float32)

    assert signals_of(step(0, None, 0.0), Elsewhere())["varentropy"] == pytest.approx(0.0)
    logits = np.log(np.array([0.5, 0.25, 0.25]))
    surprisal = np.log([2.0, 4.0, 4.0])
    mean = (np.array([0.5, 0.25, 0.25]) * surprisal).sum()
    assert varentropy(logits) == pytest.approx((np.array([0.5, 0.25, 0.25]) * (surprisal - mean) ** 2).sum())
