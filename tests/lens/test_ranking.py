"""The ranking that a stored run shows: against effects of each lost step alone, added by hand, in rounds; what it costs
in prefills; where an answer ends; and traces of before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import support
import torch

from kvlens.engine import effect, engine, loop
from kvlens.engine.comparison import Reference
from kvlens.engine.effect import effects
from kvlens.engine.engine import Engine
from kvlens.engine.models import load
from kvlens.engine.options import Options
from kvlens.engine.prefill import ReadPrompt
from kvlens.engine.ranking import PER_ROUND, ROUNDS, Records, Repeat, triples
from kvlens.holds import Triple, holds_of
from kvlens.instruments import Effects
from kvlens.lens.attribution import attribute
from kvlens.lens.verdict import verdict
from kvlens.methods.full import FullKV
from kvlens.runs import preparing
from kvlens.runs.answerend import ANSWER_STEPS, answer_end, gives_answer
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader
from kvlens.text.prompts import Prompt, PromptText

METHOD, BUDGET, MAX_NEW = "streaming_llm", "10%", 24


@pytest.fixture(scope="module")
def prompt() -> Prompt:
    return cast(Prompt, support.task_prompt(load("demo"), "multikey", 512, 0.5, 3)[0])


@pytest.fixture(scope="module")
def stored(prompt: Prompt, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceReader]:
    folder = tmp_path_factory.mktemp("ranking")
    with TraceReader.open(folder, run(prompt, folder)) as reader:
        yield reader


def run(prompt: Prompt, folder: Path, **changes: Any) -> str:
    request = RunRequest(model="demo", method=METHOD, budget=BUDGET, max_new=MAX_NEW, against=True)
    source = prompt.source
    return carry_out(request.model_copy(update=changes), source, folder, lambda *_: None, lambda: False)[0]


def added(repeat: Repeat, records: Records, end: int, patch: pytest.MonkeyPatch) -> tuple[list[int], np.ndarray]:
    """Return (lost steps, effects [L, H_kv, spans]) with each lost step measured alone."""
    moved: list[np.ndarray] = []
    with patch.context() as here:
        most = effect._most

        def watched(steps: tuple[int, ...], lead: float, array: np.ndarray) -> Effects:
            moved.append(array)
            return most(steps, lead, array)

        here.setattr(effect, "_most", watched)
        steps = [(step.loss, step.oracle) for step in records.steps]
        lost = [index for index, (loss, _) in enumerate(steps[:end]) if loss and not loss.agrees]
        for index in lost:
            alone = [
                (loss and replace(loss, agrees=loss.agrees or place != index), oracle)
                for place, (loss, oracle) in enumerate(steps)
            ]
            effects(repeat.engine.loaded, repeat.read, repeat.reference, alone, records.spans)
    assert len(moved) == len(lost)
    return lost, np.sum(moved, axis=0)


def first_of(total: np.ndarray, spans: Sequence[int], ranking: Sequence[Triple], count: int) -> list[Triple]:
    order = zip(*np.unravel_index(np.argsort(-total, axis=None, kind="stable"), total.shape), strict=True)
    named = [(int(layer), int(head), int(span)) for layer, head, span in order]
    return [triple for triple in named if triple[2] in spans and triple not in ranking][:count]


def test_what_is_shown_is_the_sum_over_lost_steps_of_a_run_along_full_kvs_tokens(
    stored: TraceReader, prompt: Prompt, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Engine(load("demo"))
    full = support.run(model.loaded, prompt, "full", max_new=MAX_NEW, keep_logits=True)
    reference = Reference("", tuple(full.ids), torch.stack(full.logits))
    method = support.method_of(METHOD)
    params = method.Parameters(**{name: stored.meta.config[name] for name in stored.meta.config})
    from kvlens.budget import Budget
    from kvlens.engine.engine import Options

    options = Options(max_new=MAX_NEW)
    repeat = Repeat(model, prompt, method, params, Budget.parse(BUDGET), options, reference, model.read(prompt))
    step = int(stored.loss().query("not agrees")["step"].iloc[0])
    end = answer_end(model.loaded, prompt, reference, step, gives_answer(model.loaded, prompt, reference))
    window = set(stored.spans().query("kind == 'window'")["span"])
    shown = [triple for triple in stored.meta.effect_order if triple[2] not in window]
    ranking: list[Triple] = []
    for number in range(ROUNDS - 1):
        records = repeat.follow(end, holds_of(ranking, {row.span: row for row in stored.span_rows()}))
        lost, total = added(repeat, records, end, monkeypatch)
        if number == 0:
            assert stored.meta.effect_steps == tuple(lost)
            assert len(lost) > 1, "an answer of several tokens, several of which are lost"
            own = dict(np.ndenumerate(total))
            leads = [reference.logits[index].max() - reference.logits[index, losing(records, index)] for index in lost]
            assert stored.effects(step)["lead"].iloc[0] == pytest.approx(float(sum(leads)), rel=1e-5)
            top = stored.effects(step).iloc[0]
            first = int(top["layer"]), int(top["kv_head"]), int(top["span"])
            assert top["effect"] == pytest.approx(own[first], rel=1e-3)
        if not lost:
            break
        chosen = first_of(total, list(records.holdable), ranking, PER_ROUND)
        assert set(shown[len(ranking) : len(ranking) + PER_ROUND]) == set(chosen)
        ranking += chosen
    listed = attribute(stored)[["layer", "kv_head", "span"]].astype(int).itertuples(index=False, name=None)
    assert [triple for triple in listed if triple[2] not in window][: len(shown)] == shown
    found = verdict(stored)
    assert found is not None
    assert found.missed is not None
    assert found.missed.effect_steps == stored.meta.effect_steps


def losing(records: Records, step: int) -> int:
    loss = records.steps[step].loss
    assert loss is not None
    return loss.top_token


def test_the_ranking_reads_no_prompt_of_its_own(
    prompt: Prompt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count: list[int] = []
    read = loop.prefill

    def counted(*given: Any) -> Any:
        count.append(1)
        return read(*given)

    monkeypatch.setattr(loop, "prefill", counted)
    monkeypatch.setattr(engine, "prefill", counted)
    monkeypatch.delenv(preparing.READINGS, raising=False)
    run(prompt, tmp_path / "runs")
    assert len(count) == 1, "one reading serves the reference, the run and all rounds"
    count.clear()
    monkeypatch.setenv(preparing.READINGS, str(tmp_path / "readings"))
    uid = run(prompt, tmp_path / "kept")
    assert len(count) == 1, "a kept reading serves the reference, the run and the ranking"
    with TraceReader.open(tmp_path / "kept", uid) as reader:
        assert reader.meta.effect_s is not None
        assert reader.meta.effect_order


def test_a_trace_of_before_is_of_its_step_of_loss_alone_and_in_the_order_of_effects(stored: TraceReader) -> None:
    meta = stored.meta
    older = meta.model_copy(update={"effect_steps": (), "effect_order": (), "effect_s": None})
    try:
        stored.meta = older
        found = verdict(stored)
        assert found is not None
        assert found.missed is not None
        assert found.missed.effect_steps == ()
        effect_column = stored.effects(found.step)["effect"]
        assert effect_column.is_monotonic_decreasing
        assert stored.effects(found.step)["place"].tolist() == list(range(1, len(effect_column) + 1))
    finally:
        stored.meta = meta


class Words:
    """A model's text of token ids: one word each, 0 is a line break."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("\n" if index == 0 else f" w{index}" for index in ids)


@dataclass
class Said:
    """As much of a loaded model as the end of an answer takes."""

    tokenizer: Words

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("ids", "answer", "step", "known", "end"),
    [
        ((3, 4, 5, 6, 7), "w4 w5", 1, True, 4),  # the answer and the token behind it
        ((3, 4, 5, 6, 7), "w4 w5", 1, False, 2),
        ((3, 4, 5), "w4 w5", 0, True, 3),
        ((3, 4, 0, 6, 7), "w9", 1, True, 3),  # no answer is found: the line
        (tuple(range(1, 90)), "w80", 2, True, 2 + ANSWER_STEPS),
    ],
)
def test_where_an_answer_ends(ids: tuple[int, ...], answer: str, step: int, known: bool, end: int) -> None:
    prompt = Prompt(PromptText("x", answer), (1,), ("x",), (None,))
    reference = Reference("", ids, torch.zeros(len(ids), 1))
    assert answer_end(cast(Any, Said(Words())), prompt, reference, step, known) == end


def test_a_round_places_two_that_can_be_held_and_holds_them_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of made-up effects: the second round finds another order, the third nothing."""
    made = [
        ((5, (0, 0, 0)), (4, (0, 0, 1)), (3, (0, 0, 2)), (2, (0, 0, 3)), (1, (0, 0, 4))),
        ((9, (0, 0, 4)), (8, (0, 0, 1)), (1, (0, 0, 5))),
        (),
    ]
    asked: list[list[Triple]] = []

    class Made(Repeat):
        def follow(self, end: int | None = None, holds: Any = (), cancelled: Any = None) -> Records:
            asked.append([(*hold.heads[0], hold.span) for hold in holds])
            return Records([*(span_row(index) for index in range(1, 6)), replace(span_row(0), kind="window")])

    def span_row(index: int) -> Any:
        from kvlens.rows import SpanRow

        return SpanRow(index, "page", 10 * index, 10 * index + 10, -1, "")

    def measured(*_: Any) -> Effects | None:
        rows = made[len(asked) - 1]
        ids = np.array([triple for _, triple in rows], np.int32).reshape(-1, 3).T
        values = np.array([value for value, _ in rows], np.float32)
        return Effects(2, 7.0, ids[0], ids[1], ids[2], values, (2, 3)) if rows else None

    monkeypatch.setattr("kvlens.engine.ranking.effects", measured)
    model = Engine(support.random_llama(0))
    base = Prompt(PromptText("x"), (1, 2), ("a", "b"), (None, None))
    result = Made(
        model, base, FullKV, FullKV.Parameters(), None, cast(Any, None), cast(Any, None), cast(Any, None)
    ).rank()
    assert result is not None
    assert (result.step, result.steps, result.lead) == (2, (2, 3), 7.0)
    assert asked == [[], [(0, 0, 1), (0, 0, 2)], [(0, 0, 1), (0, 0, 2), (0, 0, 4), (0, 0, 5)]]
    order = [((0, 0, 0), 5.0), ((0, 0, 1), 4.0), ((0, 0, 2), 3.0), ((0, 0, 4), 9.0), ((0, 0, 5), 1.0), ((0, 0, 3), 2.0)]
    assert triples(result) == order


def test_a_repeat_divides_the_device_as_the_run_does(prompt: Prompt) -> None:
    asked: list[Options] = []
    engine = cast(Engine, SimpleNamespace(run=lambda *request, **_: asked.append(request[4])))
    reference = cast(Reference, SimpleNamespace(ids=(5, 6, 7, 8)))
    for planned in (None, 64):
        options = Options(12, planned=planned)
        Repeat(engine, prompt, FullKV, None, None, options, reference, cast(ReadPrompt, None)).follow(3)
    assert [options.forced for options in asked] == [(5, 6, 7)] * 2
    assert [options.divided() for options in asked] == [12, 64]


def test_a_repeat_that_is_lost_later_than_the_run_ends_costs_the_effects_alone(
    prompt: Prompt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Repeat.rank

    def later(self: Repeat, *request: Any) -> Effects | None:
        found = rank(self, *request)
        return None if found is None else replace(found, step=MAX_NEW)

    monkeypatch.setattr(Repeat, "rank", later)
    with TraceReader.open(tmp_path, run(prompt, tmp_path)) as reader:
        assert reader.status == "completed"
        assert reader.meta.no_effects is not None
