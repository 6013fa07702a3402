"""`kvlens.observe`: a generation that the caller steers becomes a stored run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kvlens.api.asking import folder_of
from kvlens.api.carrying import carrying
from kvlens.api.errors import RequestError, translated
from kvlens.api.models import Given
from kvlens.api.pieces import Triple, take_triples
from kvlens.api.places import take_places
from kvlens.api.prompts import refuse_no_text
from kvlens.api.storedrun import Run
from kvlens.observing.options import DEFAULTS, Options
from kvlens.observing.refusals import CannotObserve
from kvlens.recording import sampling

if TYPE_CHECKING:
    from kvlens.holds import Drop, Hold


class observe:  # noqa: N801 - used as a function
    """Observe what a model generates inside a `with` block, and store it as a run.

    Every call of the model passes through unchanged: its tokens are the same, bit for bit, with and without. The block
    may use any cache of transformers and any press of kvpress. One generation is observed, of one sequence.

    Args:
        model: a decoder loaded with transformers, attending through "sdpa" or "eager".
        tokenizer: its tokenizer.
        answer: what a right output contains.
        needle: words of the prompt that hold the answer.
        row: of a batch, the sequence that is observed; padding on its left is left out.
        shadow: keep a copy of all keys and values, outside the cache: gives full attention (coverage, regret, holes)
            and finds rotated, merged and quantised keys. False: exact keys are found by 16 bytes each.
        compare: run full KV of the same prompt with kvlens when the block has ended, and compare every step with it.
        oracle: at which steps full attention is recorded, as for `run`.
        name: what the run calls the model.
        repeat: an observed run that this block repeats with `hold` or `drop`.
        hold, drop: (layer, KV head, span) whose keys and values are put back from the shadow copy, or which are not
            attended, from step 1 on.
        runs: folder to store in; None: $KVLENS_RUNS, else ./runs.
        progress: show bars.

    Raises:
        RequestError: `attention_without_weights`, `already_observed`, `layers_without_attention`, `not_a_text`,
            `no_tokenizer`, `bad_value`; when the block ends `nothing_observed`, `bad_prompt`; inside it `no_such_row`,
            `padding_right`, `beams`.

    >>> with kvlens.observe(model, tokenizer, answer="48213") as seen:  # doctest: +SKIP
    ...     model.generate(**inputs)
    >>> seen.run.verdict.outcome  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        answer: str | None = DEFAULTS.answer,
        needle: str | None = DEFAULTS.needle,
        row: int = DEFAULTS.row,
        shadow: bool = DEFAULTS.shadow,
        compare: bool = DEFAULTS.compare,
        oracle: str = DEFAULTS.oracle,
        name: str | None = DEFAULTS.name,
        repeat: Run | None = None,
        hold: Sequence[Triple] = (),
        drop: Sequence[Triple] = (),
        runs: str | Path | None = None,
        progress: bool = True,
    ) -> None:
        from kvlens.observing.watch import Watch

        self._folder, self._progress = folder_of(runs), progress
        self._model, self._tokenizer, self._run = model, tokenizer, None
        with translated():
            refuse_no_text(answer=answer, needle=needle, name=name)
            sampling.check(oracle)
            if not callable(getattr(tokenizer, "decode", None)):
                raise RequestError("no_tokenizer", "tokenizer= takes the model's tokenizer, not its name or None.")
            holds, drops = _ranges(repeat, hold, drop)
            options = Options(
                answer=answer if answer or repeat is None else repeat.meta.answer,
                needle=needle,
                row=row,
                shadow=shadow,
                compare=compare,
                oracle=oracle,
                name=name,
                holds=holds,
                drops=drops,
                parent=None if repeat is None else repeat.reader,
            )
            self._watch = Watch(model, tokenizer, options)

    _run: Run | None

    @property
    def run(self) -> Run:
        """The stored run. Raises RequestError `block_open` before the block has ended."""
        if self._run is None:
            raise RequestError("block_open", "the run is stored when the block ends: use seen.run behind it.")
        return self._run

    def __enter__(self) -> Self:
        with translated():
            self._watch.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.leave()
        if isinstance(error, CannotObserve):
            with translated():
                raise error
        if error is not None and not self._watch.observer.steps:
            return
        sentence = None if error is None else f"{type(error).__name__}: {error}"
        with translated():
            models = Given(self._watch.loaded())
        with carrying(models, self._progress) as job:
            uid = self._watch.close(self._folder, sentence, job.progress.report)
        self._run = Run(self._folder, uid, models, self._progress)


def _ranges(
    repeat: Run | None, hold: Sequence[Triple], drop: Sequence[Triple]
) -> tuple[tuple[Hold, ...], tuple[Drop, ...]]:
    """Return what is held and dropped, as ranges of tokens of the repeated run's spans."""
    from kvlens.holds import Drop, Hold

    if not hold and not drop:
        return (), ()
    if repeat is None or repeat.meta.observed is None:
        raise RequestError("repeat_missing", "hold= and drop= name spans of an observed run: pass it as repeat=.")
    hold, drop = take_triples(hold, "hold"), take_triples(drop, "drop")
    for layer, head, _ in (*hold, *drop):
        take_places(repeat.reader, None, layer, head)
    spans = {row.span: row for row in repeat.reader.span_rows() if row.tok_end > row.tok_start}
    unknown = [triple for triple in (*hold, *drop) if triple[2] not in spans]
    if unknown:
        raise RequestError(
            "unknown_span", f"run {repeat.uid} has no span {unknown[0][2]} of the prompt.", triples=unknown
        )

    def ranges(kind: Any, triples: Sequence[Triple]) -> Any:
        heads: dict[int, set[tuple[int, int]]] = {}
        for layer, head, span in triples:
            heads.setdefault(span, set()).add((layer, head))
        return tuple(
            kind(span, spans[span].tok_start, spans[span].tok_end, tuple(sorted(chosen)), 1)
            for span, chosen in sorted(heads.items())
        )

    return ranges(Hold, hold), ranges(Drop, drop)
