"""Every registered method on a prompt that is read at once, in chunks, or was read before for several runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Prompts, preset_of, run, share_of

from kvlens import methods

NAMES = list(methods.registry())


class AtOnce:
    """Per method, made when first asked for: the run that reads the prompt at once, and its settings."""

    def __init__(self, demo: Any, prompt: Any) -> None:
        self._demo, self._prompt = demo, prompt
        self._made: dict[str, tuple[Any, dict[str, Any]]] = {}

    def __getitem__(self, name: str) -> tuple[Any, dict[str, Any]]:
        if name not in self._made:
            budget, preset = share_of(name, "0.4"), preset_of(name)
            settings = {"budget": budget, "preset": preset, "max_new": 8, "keep_logits": True}
            self._made[name] = run(self._demo, self._prompt, name, prefill_chunk=0, **settings), settings
        return self._made[name]


@pytest.fixture(scope="module")
def at_once(demo: Any, prompts: Prompts) -> AtOnce:
    return AtOnce(demo, prompts.task("needle", 700))


@pytest.mark.parametrize("name", NAMES)
def test_chunked_prefill_equals_one_shot(demo: Any, prompts: Prompts, at_once: AtOnce, name: str) -> None:
    whole, settings = at_once[name]
    chunked = run(demo, prompts.task("needle", 700), name, prefill_chunk=97, **settings)
    assert whole.ids == chunked.ids
    torch.testing.assert_close(whole.surprisal.whole(), chunked.surprisal.whole(), atol=1e-4, rtol=1e-4, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_read_before_gives_the_same_run(demo: Any, prompts: Prompts, at_once: AtOnce, name: str) -> None:
    whole, settings = at_once[name]
    prompt = prompts.task("needle", 700)
    for _ in range(2):
        shared = run(demo, prompt, name, read=prompts.read(prompt, name, chunk=0), **settings)
    assert shared.ids == whole.ids
    assert all(torch.equal(a, b) for a, b in zip(shared.logits, whole.logits, strict=True))
