"""What a run lost, and whether something held, or another budget, brings it back; and whether an answer stands without
what is dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvlens import tasks
from kvlens.holds import Drop, Hold, held_bytes, less, tokens_of
from kvlens.instruments import Loss
from kvlens.lens.hold_changes import drop_from_holds
from kvlens.lens.search import Head, Measured, Search, SearchResult
from kvlens.lens.trials import Trials
from kvlens.metaparts import Counterfactual
from kvlens.metaparts import Search as SearchMeta
from kvlens.refusal import Refusal
from kvlens.runs.answerend import answer_end, gives_answer
from kvlens.runs.repeat import Past
from kvlens.runs.request import Report

if TYPE_CHECKING:
    from kvlens.budget import Budget
    from kvlens.engine.engine import Result


@dataclass
class Question:
    """What was lost, and how to see whether it is back."""

    trials: Trials
    """of the run as it is tried: with what is changed, if anything is"""
    step: int | None
    """the step of loss; None: every step agrees with full KV"""
    kl_before: float | None
    """nats, at the step of loss"""
    answer_before: str
    expected: str
    by_answer: bool
    """the answer is known and full KV gives it, so it decides; else full KV's token at the step of loss does"""
    was_right: bool
    """nothing to bring back"""
    kl_then: dict[int, float] = field(default_factory=dict)
    """step -> nats before, where it was compared with full KV"""
    _losses: dict[tuple[tuple[Hold, ...], int | None], list[Loss | None]] = field(default_factory=dict)

    @classmethod
    def about(cls, past: Past, trials_before: Trials, trials_after: Trials, report: Report) -> Question:
        """From what the run recorded, as far as it did; the rest is run again, which is reported as `again`. before:
        of the run as it was; after: as it is tried."""

        def again(repeat: Callable[[Sequence[Hold]], Result]) -> Result:
            trials_before.ready()
            report("again", 0, 1)
            return repeat(())

        source, reference = past.source, trials_before.reference
        question_tokens = len(trials_before.prompt.asked)
        full_text = trials_before.engine.loaded.decode(reference.ids[question_tokens:])
        by_answer = gives_answer(trials_before.engine.loaded, trials_before.prompt, reference)
        free_text = past.text if past.whole and not past.forced else again(trials_before.free).text
        known_values = past.losses
        if past.uid == reference.uid:
            known_values = dict.fromkeys(range(question_tokens, len(reference.ids)), (True, 0.0))
        lost = [(step, kl) for step, (agrees, kl) in sorted(known_values.items()) if not agrees]
        if not lost and len(known_values) < len(reference.ids) - question_tokens:
            losses = again(trials_before.forced).losses
            known_values = {step: (loss.agrees, loss.kl) for step, loss in enumerate(losses) if loss is not None}
            lost = [(step, kl) for step, (agrees, kl) in known_values.items() if not agrees]
        step, kl = lost[0] if lost else (None, None)
        expected = source.answer if by_answer and source.answer is not None else full_text
        right = tasks.is_right(source.task, expected, free_text, source.answers) if by_answer else step is None
        return cls(
            trials_after,
            step,
            kl,
            free_text,
            expected,
            by_answer,
            right,
            {step: kl for step, (_, kl) in known_values.items()},
        )

    # ---- with holds
    def losses(self, holds: tuple[Hold, ...], steps: int | None = None) -> list[Loss | None]:
        """Per step on the reference's tokens, through the end of the answer, or the first `steps`."""
        key = holds, steps
        if key not in self._losses:
            self._losses[key] = self.trials.forced(holds, steps or self.answer_end).losses
        return self._losses[key]

    def agrees(self, holds: tuple[Hold, ...]) -> bool:
        """Full KV's token is the likeliest at the step of loss."""
        assert self.step is not None
        loss = self.losses(holds)[self.step]
        return loss is not None and loss.agrees

    def restored(self, holds: tuple[Hold, ...]) -> bool:
        """The answer is back."""
        if not self.by_answer:
            return self.agrees(holds)
        return self._is_right(self.trials.free(holds).text)

    def _is_right(self, output: str) -> bool:
        """An output is the expected answer, or one that is right as well."""
        source = self.trials.prompt.source
        return tasks.is_right(source.task, self.expected, output, source.answers)

    def lifting(self, holds: Sequence[Hold]) -> Question:
        """The same of a run that does not drop what `holds` name either, with nothing held for it."""
        return replace(self, trials=self.trials.lifting(holds), _losses={})

    def with_params(self, params: Any, budget: Budget | None) -> Question:
        """The same of a run with other parameters and another budget."""
        return replace(self, trials=self.trials.with_params(params, budget), _losses={})

    @property
    def answer_end(self) -> int:
        """The step after the answer (kvlens.runs.answerend)."""
        assert self.step is not None
        trials = self.trials
        return answer_end(trials.engine.loaded, trials.prompt, trials.reference, self.step, self.by_answer)

    # ---- searches
    def needless(self, past: Past, cancelled: Callable[[], bool]) -> bool:
        """The answer is back with nothing held, by what is changed. Raises ValueError, one sentence, where nothing was
        lost."""
        self.lost_step(past)
        unless(cancelled)
        self.trials.ready()
        return self.restored(())

    def fewest_heads(
        self,
        past: Past,
        held: Callable[[tuple[Head, ...]], tuple[Hold, ...]],
        candidates: Sequence[Head],
        report: Report,
        cancelled: Callable[[], bool],
    ) -> SearchResult:
        """The fewest of `candidates` that bring the answer back, as greedy search finds them; `held`: the holds for
        some. What it makes small is the sum of KL(full || method) over the steps from the step of loss to the end of
        the answer."""
        self.lost_step(past)
        self.trials.ready()
        report("search", 0, len(candidates))

        def holds_for(heads: tuple[Head, ...]) -> tuple[Hold, ...]:
            unless(cancelled)
            return held(heads)

        def measure(heads: tuple[Head, ...]) -> Measured:
            holds = holds_for(heads)
            losses = self.losses(holds)[self.step :]
            return Measured(sum(loss.kl for loss in losses if loss is not None), self.agrees(holds))

        def report_count(tried: int) -> None:
            report("search", tried, max(tried, len(candidates)))

        return Search(measure, lambda heads: self.restored(holds_for(heads)), report_count).run(candidates)

    def lost_step(self, past: Past) -> int:
        """The step of loss. Raises ValueError, one sentence, where there is nothing to bring back."""
        if self.step is None or self.was_right:
            raise Refusal(
                f"run {past.uid} lost nothing that could be brought back: search a run whose answer or tokens differ.",
                code="nothing_lost",
                uid=past.uid,
            )
        return self.step

    def answered(
        self, result: Result, holds: tuple[Hold, ...], drops: tuple[Drop, ...], forced: bool, search: SearchMeta | None
    ) -> Counterfactual:
        """The summary of the stored run `result`, in which `holds` were kept and `drops` left out. Of what is
        held, what the repeated run had dropped costs nothing where the answer is the same with the drop lifted and
        nothing held for it."""
        shape = self.trials.engine.loaded.shape
        loss: Loss | None = None
        step, kl = self.step, self.kl_before
        if drops and self.was_right and (worst := _worst(result.losses)) is not None:
            step, loss = worst
            kl = self.kl_then.get(step)
        elif step is not None:
            loss = result.losses[step] if step < len(result.losses) else None
            loss = loss or self.losses(holds)[step]
        text = self.trials.free(holds).text if forced else result.text
        back = self._is_right(text) if self.by_answer else loss is not None and loss.agrees
        lifted, beside = 0, drop_from_holds(holds, self.trials.drops)
        if beside != holds and self.lifting(holds).trials.free(beside).text == text:
            lifted, holds = tokens_of(less(holds, less(holds, self.trials.drops))), beside
        return Counterfactual(
            step=step,
            kl_before=kl,
            kl_after=None if loss is None else loss.kl,
            answer_before=self.answer_before,
            answer_after=text,
            expected=self.expected,
            expected_from="task" if self.by_answer else "reference",
            restored=None if self.was_right else back,
            agrees_after=None if loss is None else loss.agrees,
            held_bytes=held_bytes(holds, shape),
            held_tokens=tokens_of(holds),
            **({"dropped_tokens": tokens_of(drops), "stands": back if self.was_right else None} if drops else {}),
            **({"lifted_tokens": lifted} if lifted else {}),
            search=search,
        )


def _worst(losses: Sequence[Loss | None]) -> tuple[int, Loss] | None:
    """The first step that differs from full KV; where none does, the one of the largest KL."""
    known_values = [(step, loss) for step, loss in enumerate(losses) if loss is not None]
    differs = next((pair for pair in known_values if not pair[1].agrees), None)
    return differs or max(known_values, key=lambda pair: pair[1].kl, default=None)


def unless(cancelled: Callable[[], bool]) -> None:
    """Raises ValueError where a search is to stop."""
    if cancelled():
        raise Refusal("cancelled while searching; nothing was stored.", code="cancelled")
