"""What a run that nobody records spends on its log."""

from __future__ import annotations

from typing import Any

import pytest
from support import ListSink, Prompts, run

from kvlens.memory import evictions


@pytest.mark.parametrize("name", ["snapkv", "h2o", "sentencekv"])
def test_ranks_of_what_was_dropped_are_made_when_they_are_taken(
    demo: Any, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made: list[str] = []
    for kind in ("_cut", "_bag_cuts"):
        plain = getattr(evictions, kind)

        def counted(*given: Any, kind: str = kind, plain: Any = plain) -> Any:
            made.append(kind)
            return plain(*given)

        monkeypatch.setattr(evictions, kind, counted)
    prompt, sink = prompts.task("multikey", 256), ListSink()
    unrecorded = run(demo, prompt, name, budget="60%", max_new=4)
    assert made == []
    assert run(demo, prompt, name, budget="60%", max_new=4, sink=sink).ids == unrecorded.ids
    assert made
