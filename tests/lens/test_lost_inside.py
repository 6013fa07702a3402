"""Tokens lost inside a span that is still partly there: regret by span hides them, the lens names them, and holding
what it names brings the answer back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support import raises_code
from typer.testing import CliRunner

from kvlens.cli.main import app
from kvlens.demo.encode import demo_encode
from kvlens.demo.tasks import make_prompt
from kvlens.holds import joined
from kvlens.lens.attribution import lost_steps
from kvlens.lens.lines import LEAST, Line, inside, ranges_in_words, ranked
from kvlens.lens.reasons import explain
from kvlens.lens.trial_request import TrialRequest, holds_for, token_range
from kvlens.runs.carrying import carry_out
from kvlens.runs.repeat import read_run
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader
from kvlens.text.prompts import PromptText

#: one page is all of the prompt, so that it is partly there whatever is evicted
SETTINGS = {"tokens": "120", "page": "4096"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inside")


@pytest.fixture(scope="module")
def uid(folder: Path) -> str:
    """A forced run whose needle has left the bag."""
    made = make_prompt("needle", 420, 0.3, 9_100_001, demo_encode())
    source = PromptText(made.text, made.answer, made.needle, "needle", 1)
    request = RunRequest(
        method="streaming_llm",
        budget="40%",
        overrides=SETTINGS,
        forced_reference=True,
        max_new=8,
        ignore_eos=True,
        oracle="all",
    )
    return carry_out(request, source, folder, lambda *_: None, lambda: False)[0]


def test_regret_by_span_hides_what_coverage_shows(uid: str, folder: Path) -> None:
    with TraceReader.open(folder, uid) as reader:
        step = lost_steps(reader.loss())[0]
        regret, unread, coverage = (reader.head_cube(name)[step] for name in ("regret", "unread", "coverage"))
        np.testing.assert_allclose(coverage + unread, 1.0, atol=2e-3)
        at = np.unravel_index(np.argmax(unread - regret), unread.shape)
        assert unread[at] > 0.8
        assert regret[at] < 0.2
        heads = reader.oracle_step(step)
        listed = heads[(heads["layer"] == at[0]) & (heads["q_head"] == at[1])]
        assert float(listed["unread"].sum()) == pytest.approx(float(unread[at]), abs=1e-3)


def test_the_lens_names_the_tokens_and_holding_the_five_lines_missed_most_restores(uid: str, folder: Path) -> None:
    with TraceReader.open(folder, uid) as reader:
        steps = lost_steps(reader.loss())
        found = ranked(reader, steps)[:5]
        assert found[0].tokens
        assert found[0].words().startswith(f"lost inside span {found[0].span}: tokens")
        where = reader.tokens().set_index("pos")
        needle = reader.meta.needle[0]
        start, end = (int(where.index[where["char_start"] >= at][0]) for at in needle)
        assert any(first < end and last > start for line in found for first, last in line.tokens)
        gone = {int(pos) for step in steps for pos in reader.lost_tokens(step)["pos"]}
        kept = {pos for line in found for first, last in line.tokens for pos in range(first, last)}
        assert kept <= gone
        line = found[0]
        assert explain(reader, steps[0], line.layer, line.kv_head, line.span).kind == "partly_evicted"
    argv = ["whatif", uid, "--runs", str(folder)]
    for first, last in joined(pair for line in found for pair in line.tokens):
        argv += ["--tokens", f"{first}-{last - 1}"]
    done = CliRunner().invoke(app, argv)
    assert done.exit_code == 0, done.output
    assert "\nrestored\n" in done.stdout
    with TraceReader.open(folder, done.stdout.split()[-1]) as held:
        assert not any(hold.whole for hold in held.meta.hold)
        at = steps[0], line.layer, line.kv_head
        states = held.span_states(*at).set_index("span")["state"]
        assert states[line.span] == "partial", "holding some of a span's tokens does not make the span resident"
        assert inside(held, steps[0]) == [] or inside(held, steps[0])[0].share < found[0].share
        assert "counterfactual" in explain(held, *at, line.span).says
        told = held.events(step=0, layer=line.layer, kv_head=line.kv_head).query("kind == 'hold'")
        assert told["value"].sum() == sum(h.tok_end - h.tok_start for h in held.meta.hold)


def test_a_range_of_tokens_is_held_by_the_spans_it_lies_in(uid: str, folder: Path) -> None:
    past = read_run(folder, uid)
    window = past.positions - 2
    holds = holds_for(past, TrialRequest(tokens=((2, 6), (window, window + 2))), ((0, 0),))
    sink, page = (next(row for row in past.spans if row.kind == kind) for kind in ("sink", "page"))
    assert [(h.span, h.tok_start, h.tok_end, h.whole) for h in holds] == [
        (sink.span, 2, 4, False),
        (page.span, 4, 6, False),
        (0, window, window + 2, False),
    ]
    (all_of_it,) = holds_for(past, TrialRequest(tokens=((0, 4),)), ((0, 0),))
    assert all_of_it.whole
    with pytest.raises(ValueError, match=f"has no token {past.positions}"):
        holds_for(past, TrialRequest(tokens=((3, past.positions + 1),)), ((0, 0),))
    with raises_code("nothing_named"):
        holds_for(past, TrialRequest(), ((0, 0),))


@pytest.mark.parametrize(("text", "found"), [("396-401", (396, 402)), ("7", (7, 8)), (" 3-3 ", (3, 4))])
def test_a_range_in_words(text: str, found: tuple[int, int]) -> None:
    assert token_range(text) == found


@pytest.mark.parametrize("text", ["", "a", "-3", "5-", "9-2", "1-2-3", "²"])
def test_what_is_no_range_is_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="--tokens") as caught:
        token_range(text)
    assert "\n" not in str(caught.value)


def test_ranges_are_joined_and_named() -> None:
    assert joined([(5, 6), (1, 2), (2, 4), (5, 8)]) == ((1, 4), (5, 8))
    assert ranges_in_words(((396, 402), (407, 408))) == "tokens 396-401, 407"
    assert ranges_in_words(((7, 8),)) == "token 7"
    assert Line(0, 1, 17, 0.9, ((396, 402),)).words() == "lost inside span 17: tokens 396-401"
    assert Line(0, 1, 17, 0.9).words() == "span 17"
    assert LEAST > 0
