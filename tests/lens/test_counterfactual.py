"""The proof that the counterfactual finds a cause: models made by hand in which known heads, and no others, carry the
needle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lookup_model import save, text

from kvlens.lens.search import Measured, Search
from kvlens.lens.trial_request import TrialRequest
from kvlens.lens.whatif import whatif
from kvlens.runs.carrying import carry_out
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader, list_runs
from kvlens.text.prompts import PromptText

TOKENS, FACT = 300, 120
HEADS = tuple((layer, head) for layer in range(2) for head in range(2))


def quiet(phase: str, done: int, total: int) -> None:
    """Nobody looks."""


class Lost:
    """A run of StreamingLLM that has evicted the fact and answers wrongly."""

    def __init__(
        self, folder: Path, carriers: tuple[tuple[int, int], ...], strength: float, doubt: float, known: bool = True
    ) -> None:
        model = save(folder / "model", carriers, strength, doubt)
        self.runs = folder / "runs"
        source = PromptText(text(TOKENS, FACT), "a5" if known else None)
        request = RunRequest(model=str(model), method="streaming_llm", budget="0.3", max_new=6)
        self.uid, self.status, self.output = carry_out(request, source, self.runs, quiet, lambda: False)
        with TraceReader.open(self.runs, self.uid) as reader:
            spans = reader.spans()
        self.span = int(spans[(spans.tok_start <= FACT) & (spans.tok_end > FACT)]["span"].iloc[0])

    def whatif(self, layers: str = "all", heads: str = "all", **asked: Any) -> Any:
        return whatif(self.runs, self.uid, TrialRequest((self.span,), layers, heads, **asked), quiet)[1]


@pytest.fixture(scope="module", params=HEADS[1:3], ids=lambda head: f"layer{head[0]}-kv{head[1]}")
def one(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Lost, tuple[int, int]]:
    return Lost(tmp_path_factory.mktemp("one"), (request.param,), 0.4, 1.0), request.param


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Lost:
    """Two heads carry half each; one alone is not louder than the doubt."""
    return Lost(tmp_path_factory.mktemp("two"), ((0, 1), (1, 0)), 0.15, 1.2)


def test_only_the_head_that_carries_the_needle_brings_the_answer_back(one: tuple[Lost, tuple[int, int]]) -> None:
    lost, carrier = one
    assert lost.output.split()[0] == "f0", "the method does not know the value"
    for layer, head in HEADS:
        summary = lost.whatif(str(layer), str(head))
        back = (layer, head) == carrier
        assert summary.restored is back, (layer, head)
        assert summary.agrees_after is back
        assert (summary.answer_after == "a5") is back
        assert (summary.kl_after < 0.05 * summary.kl_before) is back


def test_the_search_returns_exactly_that_head(one: tuple[Lost, tuple[int, int]]) -> None:
    lost, carrier = one
    summary = lost.whatif(search=True)
    assert summary.search.heads == (carrier,)
    assert summary.search.everywhere is True
    assert tuple(summary.search.alone[0][:2]) == carrier
    assert summary.restored is True
    assert (summary.answer_before.split()[0], summary.answer_after) == ("f0", "a5")
    assert summary.expected == "a5"
    assert summary.step == 0


def test_a_search_tells_how_far_it_is_from_its_first_trial_on(two: Lost) -> None:
    told: list[tuple[str, int, int]] = []
    whatif(two.runs, two.uid, TrialRequest((two.span,), search=True), lambda *place: told.append(place))
    first = next(place for place, (phase, *_) in enumerate(told) if phase == "search")
    before = [phase for phase, *_ in told[:first]]
    assert "prefill" in before
    assert before[-1] == "again", "the run, which was not compared, is repeated to see what it lost"
    assert told[first] == ("search", 0, len(HEADS))
    tried = [done for phase, done, _ in told[first:] if phase == "search"]
    assert sorted(set(tried)) == [*range(tried[-1] + 1)], "every set is told of"
    assert tried == sorted(tried)
    phases = [phase for phase, *_ in told[first:]]
    assert "prefill" not in phases, "the prompt is read once for all trials and the run that is stored"


def test_a_search_can_be_cancelled_before_its_first_trial(two: Lost) -> None:
    stored = len(list_runs(two.runs))
    with pytest.raises(ValueError, match="cancelled while searching; nothing was stored"):
        whatif(two.runs, two.uid, TrialRequest((two.span,), search=True), quiet, lambda: True)
    assert len(list_runs(two.runs)) == stored


def test_two_heads_that_carry_half_each_are_found_together(two: Lost) -> None:
    for layer, head in HEADS:
        assert two.whatif(str(layer), str(head)).restored is False
    assert two.whatif().restored is True
    assert two.whatif(search=True).search.heads == ((0, 1), (1, 0))


def test_when_no_head_asked_for_carries_it_the_search_says_so(two: Lost) -> None:
    found = two.whatif("0", "all", search=True)
    assert found.search.heads == ()
    assert found.search.everywhere is False
    assert found.restored is False


def test_a_hold_that_begins_after_the_loss_brings_nothing_back(one: tuple[Lost, tuple[int, int]]) -> None:
    lost, _ = one
    assert lost.whatif(from_step=1).restored is False


def test_without_a_known_answer_full_kvs_token_decides(tmp_path: Path) -> None:
    lost = Lost(tmp_path, ((1, 1),), 0.4, 1.0, known=False)
    summary = lost.whatif(search=True)
    assert summary.expected_from == "reference"
    assert summary.expected == "a5"
    assert summary.search.heads == ((1, 1),)
    assert summary.restored is True


def test_what_is_stored_of_it(one: tuple[Lost, tuple[int, int]]) -> None:
    lost, (layer, head) = one
    stored, summary = whatif(lost.runs, lost.uid, TrialRequest((lost.span,), str(layer), str(head)), quiet)
    with TraceReader.open(lost.runs, stored.uid) as reader:
        meta, loss = reader.meta, reader.loss()
        assert all(reader.self_checks()["passed"])
        events = reader.events()
    assert meta.parent == lost.uid
    assert meta.whatif == summary
    (hold,) = meta.hold
    assert (hold.span, hold.heads, hold.from_step) == (lost.span, ((layer, head),), 0)
    assert hold.tok_start <= FACT < hold.tok_end
    assert summary.held_tokens == hold.tok_end - hold.tok_start == 16
    assert summary.held_bytes == 16 * 2 * 16 * 4
    assert loss["agrees"].iloc[0]
    assert (events["kind"] == "hold").sum() == 1
    with TraceReader.open(lost.runs, meta.reference) as reader:
        assert reader.meta.method == "full"
        assert reader.meta.output_text == "a5"


class Fake:
    """A made-up cause: `need` must all be held; divergence falls with each of them, and a little with `bait`."""

    def __init__(self, need: set[tuple[int, int]], bait: dict[tuple[int, int], float] | None = None) -> None:
        self.need, self.bait, self.asked = need, bait or {}, []

    def measure(self, heads: tuple[tuple[int, int], ...]) -> Measured:
        self.asked.append(heads)
        kl = 1.0 - len(self.need & set(heads)) / (len(self.need) + 1) - sum(self.bait.get(head, 0.0) for head in heads)
        return Measured(kl, self.need <= set(heads))

    def restored(self, heads: tuple[tuple[int, int], ...]) -> bool:
        return self.need <= set(heads)


def test_the_search_leaves_out_what_it_took_in_vain() -> None:
    fake = Fake({(0, 0), (1, 1), (2, 0)}, {(3, 1): 0.5})
    candidates = [(layer, head) for layer in range(4) for head in range(2)]
    found = Search(fake.measure, fake.restored).run(candidates)
    assert found.heads == ((0, 0), (1, 1), (2, 0))
    assert found.alone[0][0] == (3, 1)
    assert found.kl == pytest.approx(0.25)
    assert len(fake.asked) == len(set(map(frozenset, fake.asked))), "no set is measured twice"


def test_a_single_head_is_found_even_if_another_lowers_the_divergence_more() -> None:
    found = Search(Fake({(1, 1)}, {(0, 0): 0.9}).measure, Fake({(1, 1)}).restored).run([(0, 0), (0, 1), (1, 0), (1, 1)])
    assert found.heads == ((1, 1),)


def test_a_search_in_vain_ends_at_once() -> None:
    fake = Fake({(9, 9)})
    found = Search(fake.measure, fake.restored).run([(0, 0), (0, 1)])
    assert (found.heads, found.everywhere, found.tried) == ((), False, 1)
