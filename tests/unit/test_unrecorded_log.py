"""What a run that nobody records spends on its log."""

from __future__ import annotations

from typing import Any

import pytest
from support import ListSink, Prompts, run

from kvlens.memory import allocator, evictions
from kvlens.memory.memory import Memory


@pytest.mark.parametrize("name", ["snapkv", "h2o", "sentencekv"])
def test_ranks_of_what_was_dropped_are_made_when_they_are_taken(
    demo: Any, prompts: Prompts, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    made: list[str] = []
    for module, kind in ((allocator, "cuts"), (evictions, "bag_cuts")):
        plain = getattr(module, kind)

        def counted(*given: Any, kind: str = kind, plain: Any = plain) -> Any:
            made.append(kind)
            return plain(*given)

        monkeypatch.setattr(module, kind, counted)
    prompt, sink = prompts.task("multikey", 256), ListSink()
    unrecorded = run(demo, prompt, name, budget="60%", max_new=4)
    assert made == []
    assert run(demo, prompt, name, budget="60%", max_new=4, sink=sink).ids == unrecorded.ids
    assert made


def test_scores_of_what_was_dropped_are_let_go_when_nobody_records(demo: Any, prompts: Prompts) -> None:
    waiting: list[int] = []
    start_step = Memory.start_step

    def watched(memory: Memory, step: int) -> None:
        waiting.append(len(memory.log._cuts))
        start_step(memory, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memory, "start_step", watched)
        run(demo, prompts.task("multikey", 256), "h2o", budget="60%", max_new=4)
    assert len(waiting) > 2
    assert set(waiting) == {0}
