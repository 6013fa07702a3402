"""The search for the fewest bytes: made-up causes, and a model made by hand in which known heads carry the needle."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import raises_code
from test_counterfactual import FACT, Lost, quiet

from kvlens.cli.lens import sentences
from kvlens.holds import Triple
from kvlens.lens.fewest import Attempt, Fewest, FewestBytes
from kvlens.lens.search_words import describe_search
from kvlens.lens.trial_request import TrialRequest
from kvlens.lens.whatif import whatif
from kvlens.metaparts import Search
from kvlens.store.reader import TraceReader, list_runs


class Fake:
    """A made-up cause: all of `need` must be held. A triple costs its span's number."""

    def __init__(self, *need: Triple) -> None:
        self.need, self.asked = set(need), []

    def test(self, triples: tuple[Triple, ...]) -> Attempt:
        self.asked.append(triples)
        left = len(self.need - set(triples))
        return Attempt(triples, sum(map(cost, triples)), float(left), left == 0)

    def search(self, ranking: list[Triple], most: int = 40) -> Fewest:
        found = FewestBytes(self.test, cost, most).run(ranking)
        assert len(self.asked) == len(set(map(frozenset, self.asked))), "no set is held twice"
        assert [one.triples for one in found.tests] == self.asked
        return found


def cost(triple: Triple) -> int:
    return triple[2]


RANKING = [(layer, 0, 10 + layer) for layer in range(16)]


@pytest.mark.parametrize(
    "need", [(RANKING[0],), (RANKING[5],), (RANKING[1], RANKING[11]), (RANKING[0], RANKING[7], RANKING[15])]
)
def test_it_finds_exactly_what_is_needed(need: tuple[Triple, ...]) -> None:
    found = Fake(*need).search(RANKING)
    assert found.best is not None
    assert set(found.best.triples) == set(need)
    assert found.best.held_bytes == sum(map(cost, need))
    assert found.ended


def test_a_first_one_that_suffices_is_all_that_is_tried() -> None:
    found = Fake(RANKING[0]).search(RANKING)
    assert len(found.tests) == 1


def test_where_all_of_it_does_not_suffice_nothing_is_found() -> None:
    fake = Fake((99, 0, 1))
    found = fake.search(RANKING)
    assert (found.best, found.ended) == (None, True)
    assert [len(triples) for triples in fake.asked] == [1, 2, 4, 8, 16]


def test_it_holds_no_more_sets_than_it_may_and_says_so() -> None:
    found = Fake(RANKING[0], RANKING[7], RANKING[15]).search(RANKING, most=7)
    assert len(found.tests) == 7
    assert not found.ended
    assert found.best is not None
    assert found.best.held_bytes == min(one.held_bytes for one in found.tests if one.restored)


def test_of_two_causes_the_cheaper_one_stays() -> None:
    dear, cheap = (0, 0, 50), (1, 0, 3)

    def test(triples: tuple[Triple, ...]) -> Attempt:
        return Attempt(
            triples, sum(map(cost, triples)), 0.0, (2, 0, 4) in triples and bool({dear, cheap} & set(triples))
        )

    found = FewestBytes(test, cost, 40).run([dear, cheap, (2, 0, 4)])
    assert found.best is not None
    assert set(found.best.triples) == {cheap, (2, 0, 4)}


# ---- on a model
@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Lost:
    """Two heads carry half each; one alone is not louder than the doubt."""
    return Lost(tmp_path_factory.mktemp("two"), ((0, 1), (1, 0)), 0.15, 1.2)


def test_it_finds_the_heads_that_carry_the_needle_and_the_span_it_lies_in(two: Lost) -> None:
    said: list[str] = []
    told: list[tuple[int, int]] = []

    def report(phase: str, done: int, total: int) -> None:
        if phase == "search":
            told.append((done, total))

    stored, summary = whatif(two.runs, two.uid, TrialRequest(fewest=20), report, say=said.append)
    assert summary is not None
    search = summary.search
    assert search is not None
    assert set(search.triples) == {(0, 1, two.span), (1, 0, two.span)}
    assert summary.restored is True
    assert summary.answer_after == "a5"
    assert (search.most, search.ended, search.tried) == (20, True, len(search.tests))
    best = min(test.held_bytes for test in search.tests if test.restored and test.held_bytes)
    assert best == summary.held_bytes == 2 * 16 * 2 * 16 * 4, "two heads of 16 tokens of 16 numbers, K and V, float32"
    assert told == [(done, 20) for done in range(len(search.tests) + 1)]
    assert len(said) == len(search.tests)
    assert ["2.05 kB" in sentence for sentence in said[:2]] == [True, False]
    with TraceReader.open(two.runs, stored.uid) as reader:
        (hold,) = reader.meta.hold
        assert reader.meta.whatif == summary
    assert hold.tok_start <= FACT < hold.tok_end
    assert set(hold.heads) == {(0, 1), (1, 0)}


def test_as_many_sets_as_were_allowed(two: Lost) -> None:
    _, summary = whatif(two.runs, two.uid, TrialRequest(fewest=1), quiet)
    assert summary is not None
    assert summary.search is not None
    assert (summary.search.triples, summary.search.tried, summary.search.ended) == ((), 1, False)
    said = describe_search(summary.search)
    assert "(1)" in said
    assert "not bring" in said
    assert summary.restored is True, "of all candidates, which are held"
    assert f"search         {said}" in sentences(summary)


@pytest.mark.parametrize(
    ("search", "said"),
    [
        (
            Search(tried=5, most=40, ended=True),
            "None of the 5 sets tried brings the answer back; all candidates are held, which were the largest set "
            "tried.",
        ),
        (
            Search(tried=3, most=3, ended=False),
            "None of the 3 sets tried, as many as were allowed (3), brings the answer back; all candidates are held, "
            "which the search did not try.",
        ),
        (
            Search(triples=((0, 1, 5),), tried=3, most=40, ended=True, kl=0.25),
            "Fewest bytes found: span 5 for L0 KV1 (3 sets tried; not proved fewest, KL 0.25 nats).",
        ),
        (
            Search(heads=(), tried=1, everywhere=False),
            "Not even holding it for all of these heads brings the answer back (1 set of heads tried).",
        ),
    ],
)
def test_the_words_claim_no_more_than_was_tried(search: Search, said: str) -> None:
    assert describe_search(search) == said


def test_it_can_be_cancelled_and_leaves_nothing(two: Lost) -> None:
    whatif(two.runs, two.uid, TrialRequest((two.span,)), quiet)  # so that full KV's run is there
    stored = len(list_runs(two.runs))
    with pytest.raises(ValueError, match="cancelled while searching; nothing was stored"):
        whatif(two.runs, two.uid, TrialRequest(fewest=20), quiet, lambda: True)
    assert len(list_runs(two.runs)) == stored


def test_what_lost_nothing_is_not_searched(tmp_path: Path) -> None:
    lost = Lost(tmp_path, ((0, 0),), 0.4, 1.0)
    back, _ = whatif(lost.runs, lost.uid, TrialRequest((lost.span,)), quiet)
    with raises_code("nothing_lost", uid=back.uid):
        whatif(lost.runs, back.uid, TrialRequest(fewest=3), quiet)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (TrialRequest((1,), fewest=3), "chooses what to hold"),
        (TrialRequest(search=True, fewest=3), "chooses what to hold"),
        (TrialRequest(fewest=0), "at least one set"),
        (TrialRequest(fewest=3, from_step=99), "--from-step 99"),
    ],
)
def test_what_goes_not_together_is_one_sentence(two: Lost, asked: TrialRequest, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        whatif(two.runs, two.uid, asked, quiet)
