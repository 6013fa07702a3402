"""The story of the first page: it is what the gallery's two runs recorded."""

from __future__ import annotations

from pathlib import Path

from kvlens.app import gallery
from kvlens.app.gallery.story import story, story_of
from kvlens.rows import SPAN_STATES


def test_the_committed_story_is_that_of_the_recorded_runs(tmp_path: Path) -> None:
    (loss,) = (loss for loss in gallery.losses() if loss.method == story().method)
    gallery.bring(loss, tmp_path)
    assert story_of(loss, tmp_path) == story()


def test_the_story_loses_the_answer_and_gets_it_back() -> None:
    told = story()
    assert told.expected not in "".join(told.lost.tokens)
    assert told.expected in "".join(told.repaired.tokens)
    assert max(told.lost.hole) > 0.01
    for scene in (told.lost, told.repaired):
        assert len(scene.tokens) == len(scene.spans) == len(scene.hole)
        assert all(0 <= state < len(SPAN_STATES) and start <= end for row in scene.spans for start, end, state in row)
