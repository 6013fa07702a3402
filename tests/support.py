"""Helpers of the tests: models, prompts, sinks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvlens.checking import models

BASE, NoTokenizer, ListSink = models.BASE, models.NoTokenizer, models.RecordList
loaded, random_prompt = models.as_loaded, models.random_prompt


def random_llama(seed: int = 0, **changes: Any) -> Any:
    """See kvlens.checking.models, with one torch thread."""
    import torch

    torch.set_num_threads(1)
    return models.random_llama(seed, **changes)


def task_prompt(demo: Any, task: str, length: int, depth: float = 0.5, seed: int = 0, max_new: int = 24) -> Any:
    """A generated task for the demo model -> (tokenized prompt, task)."""
    from kvlens.demo.encode import demo_encode
    from kvlens.demo.tasks import make_prompt
    from kvlens.text.prompts import PromptText, tokenize

    made = make_prompt(task, length, depth, seed, demo_encode())
    return tokenize(PromptText(made.text, made.answer, made.needle), demo.tokenizer, demo.max_positions, max_new), made


class Prompts:
    """A model's prompts, each made once and read once for all methods that ask to see the same of it. That a run of a
    prompt that was read before is the run that reads it itself is proved in truths/test_matrix.py, for every method."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._made: dict[tuple[str, int], Any] = {}
        self._read: dict[tuple[Any, ...], Any] = {}

    def task(self, task: str, length: int) -> Any:
        """Of the demo model."""
        if (task, length) not in self._made:
            self._made[task, length] = task_prompt(self._model, task, length)[0]
        return self._made[task, length]

    def read(self, prompt: Any, method: str, chunk: int = 512) -> Any:
        """A ReadPrompt that serves the method."""
        from kvlens import methods
        from kvlens.engine.engine import Engine

        asks = method_of(method).needs.received
        if (prompt.ids, chunk, asks) not in self._read:
            queries = max(one.needs.queries for one in methods.registry().values())
            self._read[prompt.ids, chunk, asks] = Engine(self._model).read(prompt, chunk, queries, asks)
        made = self._read[prompt.ids, chunk, asks]
        assert made.serves(method_of(method))
        return made


def run(
    model: Any,
    prompt: Any,
    method: str,
    *,
    budget: str | None = None,
    preset: str | None = None,
    sink: Any = None,
    overrides: dict[str, Any] | None = None,
    keep_logits: bool = False,
    read: Any = None,
    against: Any = None,
    holds: Any = (),
    drops: Any = (),
    **options: Any,
) -> Any:
    """Engine.run with a method by name, or by 'name parameter=value'."""
    from kvlens import methods
    from kvlens.budget import Budget
    from kvlens.engine.engine import Engine, Options

    chosen, own = method_of(method), dict(pair.split("=") for pair in method.split()[1:])
    params = methods.make_parameters(chosen, preset, {**own, **(overrides or {})})
    limit = None if budget is None else Budget.parse(budget)
    made = Options(**options)
    return Engine(model).run(
        prompt,
        chosen,
        params,
        limit,
        made,
        sink,
        keep_logits=keep_logits,
        read=read,
        against=against,
        holds=holds,
        drops=drops,
    )


def method_of(name: str) -> Any:
    """The method of 'name', or of 'name parameter=value'."""
    from kvlens import methods

    return methods.get(name.split()[0])


def preset_of(name: str) -> str | None:
    """The settings that suit the demo model, where a method has such."""
    return "demo" if "demo" in method_of(name).presets else None


SAVES_LITTLE = ("minicache", "thinkkv")
"""methods that need more than four fifths of full KV"""


def share_of(name: str, share: str = "0.2") -> str | None:
    """A budget the method can run with: no limit where it keeps everything on the device, or nearly so."""
    return None if method_of(name).keeps_all or name in SAVES_LITTLE else share


def makes() -> list[str]:
    """One registered method of each make: the first that asks of memory and engine what no method before it asks. What
    proves the machinery and not the method is run for these."""
    from kvlens import methods
    from kvlens.methods.base import Method

    first: dict[tuple[Any, ...], str] = {}
    registered = methods.registry()
    for name, method in registered.items():
        needs = method.needs
        asks = (method.keeps_all, needs.peek, needs.weights, needs.received, method.static_ready)
        own = tuple(
            getattr(method, hook) is not getattr(Method, hook) for hook in ("select", "decode_end", "factor_form")
        )
        base = next(
            kind
            for kind in method.__mro__
            if kind.__module__.startswith("kvlens.methods") and kind not in registered.values()
        )
        # methods on the plain base are each a make of their own
        first.setdefault((base if base is not Method else method, asks, own), name)
    return list(first.values())


@contextmanager
def raises_code(code: str, kind: type[Exception] = Exception, **values: Any) -> Iterator[pytest.ExceptionInfo[Any]]:
    """The block raises an error of this code, kind and these values, whatever its sentence is. Of an error that
    pydantic has wrapped, the error inside counts."""
    with pytest.raises(kind) as caught:
        yield caught
    error: Any = caught.value
    if isinstance(error, ValidationError):
        error = error.errors()[0]["ctx"]["error"]
    known = {name: getattr(error, "values", {}).get(name) for name in values}
    assert (getattr(error, "code", ""), known) == (code, values), str(error)


def measured_batches(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """Return the list in which every batch of steps is noted that a recorder measures from now on."""
    from kvlens.recording import recorder

    batches: list[list[Any]] = []
    plain = recorder.measure

    def note(shots: list[Any], *sizes: int) -> Any:
        batches.append(shots)
        return plain(shots, *sizes)

    monkeypatch.setattr(recorder, "measure", note)
    return batches
