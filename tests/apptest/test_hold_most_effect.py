"""Replay offers to hold what had most effect on the choice, each for the KV head that missed it."""

from __future__ import annotations

import pytest
from lensruns import STEP, LensRuns, write_lens_runs
from streamlit.testing.v1 import AppTest
from test_lens_on_replay import finished, press
from uiruns import Visit

from kvlens.app.ui.common import lensjobs
from kvlens.app.ui.common.request import TryChoice
from kvlens.app.ui.replay.lenschoices import MOST, choices_of
from kvlens.lens.attribution import attribute
from kvlens.lens.pieces import Piece
from kvlens.lens.verdict import verdict
from kvlens.store.reader import TraceReader

OFFER = f"the first {MOST} lines of the ranking (one KV head and span each)"


@pytest.fixture(scope="module")
def lens(tmp_path_factory: pytest.TempPathFactory) -> LensRuns:
    return write_lens_runs(tmp_path_factory.mktemp("lens-runs"))


def boxes(app: AppTest) -> tuple[AppTest, AppTest]:
    """What to hold, and for which KV heads."""
    at = [box.label for box in app.selectbox].index("for")
    return app.selectbox[at - 1], app.selectbox[at]


def test_each_is_held_for_its_kv_head(visit: Visit, lens: LensRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[TryChoice] = []
    monkeypatch.setattr(lensjobs, "whatif_command", lambda uid, hold, runs: asked.append(hold) or finished(lens.held))
    app = visit(lens.folder, "replay", run=lens.repeated)
    what, whose = boxes(app)
    assert (what.value, whose.value, whose.disabled) == (what.options[0], "all KV heads", False)
    app = what.set_value(OFFER).run()
    what, whose = boxes(app)
    assert what.value == OFFER
    assert (whose.options, whose.disabled) == (["its KV head"], True)
    press(app, "Hold it resident")
    with TraceReader.open(lens.folder, lens.repeated) as reader:
        first = attribute(reader).head(MOST)
    assert first["effect"].gt(0).all()
    triples = first[["span", "layer", "kv_head"]].astype(int).itertuples(index=False, name=None)
    assert asked == [TryChoice(tuple(Piece(span, None, layer, head) for span, layer, head in triples), STEP)]


def test_it_is_offered_where_the_verdict_points_and_where_effects_were_recorded(lens: LensRuns) -> None:
    with TraceReader.open(lens.folder, lens.repeated) as reader:
        found = verdict(reader)
        assert found is not None
        assert found.missed is not None
        span = found.missed.span
        assert list(choices_of(reader, span, found))[:2] == [f"span {span}", OFFER]
        assert OFFER not in choices_of(reader, span + 1, found)
        bare = reader.triples(STEP).assign(effect=float("nan"))
        reader.triples = lambda step: bare  # type: ignore[method-assign]
        assert OFFER not in choices_of(reader, span, found)
