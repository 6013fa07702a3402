"""Runs of one prompt under one method with different things held or dropped, in memory: what the counterfactual and its
search are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvlens import tasks
from kvlens.holds import Drop, Hold, less
from kvlens.methods.base import Method
from kvlens.records import TraceSink
from kvlens.rows import SpanRow

if TYPE_CHECKING:
    from kvlens.budget import Budget
    from kvlens.engine.bit_effects import PackedPrompt
    from kvlens.engine.comparison import Reference
    from kvlens.engine.engine import Engine, Options, Result
    from kvlens.engine.prefill import ReadPrompt
    from kvlens.engine.ranking import Repeat
    from kvlens.runs.request import Report
    from kvlens.text.prompts import Prompt


@dataclass(frozen=True)
class Outcome:
    """A free run with something held."""

    text: str
    restored: bool
    """the answer is what was expected"""
    result: Result


def restores(
    engine: Engine,
    prompt: Prompt,
    read: ReadPrompt | None,
    method: type[Method],
    params: Any,
    budget: Budget | None,
    options: Options,
    holds: Sequence[Hold],
    answer: str,
    task: str | None = None,
) -> Outcome:
    """Whether the method answers `answer` by itself when `holds` are kept. `read`: the prompt, read before; None: it is
    prefilled. `task`: whose metric decides; None: the prompt's own, or the first line where it has none. Nothing is
    recorded."""
    assert options.forced is None, "whether an answer is back is asked of a free run"
    result = engine.run(prompt, method, params, budget, options, read=read, holds=holds)
    return Outcome(result.text, tasks.is_right(task or prompt.source.task, answer, result.text), result)


class Trials:
    """Repeats of one run in memory. The prompt is prefilled once, and only when it is needed."""

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        method: type[Method],
        params: Any,
        budget: Budget | None,
        options: Options,
        reference: Reference,
        kept: Sequence[Hold] = (),
        report: Report = lambda phase, done, total: None,
        reader: Callable[[], ReadPrompt] | None = None,
        drops: Sequence[Drop] = (),
    ) -> None:
        """options: of the free run; kept: what the run held by itself, and goes on holding; report: hears of the
        prefill. reader: reads the prompt, or has it of an earlier run (kvlens.runs.readings). drops: what is not
        attended, in all repeats that do not hold it."""
        self.engine, self.prompt, self.method, self.params, self.budget = engine, prompt, method, params, budget
        self.options, self.reference, self.kept, self._report = options, reference, tuple(kept), report
        self._read: ReadPrompt | None = None
        self._reader, self.drops = reader, tuple(drops)

    def lifting(self, holds: Sequence[Hold]) -> Trials:
        """The same without the drops of what `holds` name, of a prompt that is read once for both."""
        self.ready()
        copied = copy(self)
        copied.drops = less(self.drops, holds)
        return copied

    def with_params(self, params: Any, budget: Budget | None) -> Trials:
        """The same with other parameters and another budget, of a prompt that is read once for both."""
        self.ready()
        copied = copy(self)
        copied.params, copied.budget = params, budget
        return copied

    def ready(self) -> None:
        """Read the prompt now, so that what follows is repeats alone; nothing where the method must see it each
        time."""
        self._prompt()

    def reading(self) -> ReadPrompt:
        """Return the prompt, read once for all trials."""
        read = self._prompt()
        assert read is not None, "a trial's prompt is read once for all"
        return read

    def packed(self) -> PackedPrompt | None:
        """Return the prompt as the method's codes hold it; None: the method packs nothing."""
        from kvlens.engine.bit_effects import packed_prompt

        places = self.prompt, self.method, self.params, self.budget, self.options
        return packed_prompt(self.engine, *places, self.reading())

    def free(self, holds: Sequence[Hold]) -> Result:
        """On its own tokens."""
        return self._run(holds, self.options)

    def forced(self, holds: Sequence[Hold], steps: int | None = None) -> Result:
        """On the reference's tokens, all or the first `steps` of them; every step is compared."""
        return self._run(holds, self.options.along(self.reference.ids[:steps]))

    def followed(self, steps: int, sink: TraceSink | None = None, holds: Sequence[Hold] = ()) -> Result:
        """On the first `steps` of the reference's tokens, with the logits of every step; with a sink also with full
        attention by span of every step and layer."""
        options = replace(
            self.options.along(self.reference.ids[:steps]),
            coverage=sink is not None,
            oracle="off" if sink is None else "all",
        )
        return self._run(holds, options, sink, keep_logits=True)

    def repeat(self) -> Repeat:
        """Return this run as one that can follow the reference's tokens and rank what it missed."""
        from kvlens.engine.ranking import Repeat

        read = self.reading()
        return Repeat(
            self.engine,
            self.prompt,
            self.method,
            self.params,
            self.budget,
            self.options,
            self.reference,
            read,
            self.kept,
            tuple(self.drops),
        )

    def spans(self, holds: Sequence[Hold], fed: bool) -> tuple[SpanRow, ...]:
        """All spans of the run with `holds`, on its own tokens, or `fed` the reference's: a decoded text may be cut as
        its words are."""
        from kvlens.engine.ranking import Records

        record, options = Records(), replace(self.options, coverage=False)
        if fed:
            options = options.along(self.reference.ids)
        self._run(holds, options, record)
        return tuple(record.spans)

    def _run(
        self, holds: Sequence[Hold], options: Options, sink: TraceSink | None = None, keep_logits: bool = False
    ) -> Result:
        return self.engine.run(
            self.prompt,
            self.method,
            self.params,
            self.budget,
            options,
            sink,
            read=self._prompt(),
            keep_logits=keep_logits,
            against=self.reference,
            holds=(*self.kept, *holds),
            drops=less(self.drops, holds),
        )

    def _prompt(self) -> ReadPrompt | None:
        if self._read is None and self._reader is not None:
            self._read = self._reader()
        elif self._read is None:
            queries, received = max(128, self.method.needs.queries), self.method.needs.received
            self._read = self.engine.read(self.prompt, self.options.prefill_chunk, queries, received, self._report)
        return self._read
