"""Whether an output is the expected answer, from recorded facts."""

from __future__ import annotations

from kvlens import tasks
from kvlens.meta import RunMeta
from kvlens.store.outcomefacts import OutcomeFacts
from kvlens.store.reader import TraceReader


def right(reader: TraceReader) -> bool | None:
    """Whether a run's output is the expected answer, as `is_right` has it."""
    return is_right(reader.meta)


def full_right(reader: TraceReader) -> bool | None:
    """Whether the output of the full-KV run it was compared with is the expected answer; None where none is known, it
    cannot be scored here, or that output was not recorded."""
    return is_expected(reader.meta, reader.meta.reference_output)


def is_right(run: RunMeta | OutcomeFacts) -> bool | None:
    """Return whether the output is the expected answer; None where none is known, it cannot be scored here, or the run
    was fed its tokens."""
    return None if run.forced else is_expected(run, run.output_text)


def is_cut_off(run: RunMeta | OutcomeFacts) -> bool:
    """Return True if the output is not the expected answer and ended at the limit of new tokens: a longer one might
    contain the answer."""
    return run.stopped == "length" and is_right(run) is False


def answer_sentence(run: RunMeta | OutcomeFacts) -> str:
    """Return whether the answer is right, with a blank in front: ' The answer is wrong; the limit of new tokens cut it
    off.'; '' where none is known."""
    answer = is_right(run)
    if answer is None:
        return ""
    words = f" The answer is {'right' if answer else 'wrong'}"
    return f"{words}; the limit of new tokens cut it off." if is_cut_off(run) else f"{words}."


def is_expected(run: RunMeta | OutcomeFacts, output: str | None) -> bool | None:
    """Return whether an output is the run's expected answer; None where either is not known, or it cannot be scored
    here."""
    if not run.answer or output is None:
        return None
    return tasks.judged(run.task, run.answer, output, run.answers)
