"""What can go wrong in the API: exceptions with a code and typed values, and their one-sentence texts.

The core raises its own errors in the words of the command line. `translated` turns them into these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from kvlens.api.words import in_python


class KvlensError(Exception):
    """An error of kvlens. `str(error)` is one sentence: what is wrong and what to do."""

    def __init__(self, code: str, sentence: str, **values: Any) -> None:
        super().__init__(sentence)
        self.code = code
        """a name that stays the same when the sentence is mended, see docs/api.md"""
        self.values = values
        """the figures and names of the sentence"""


class RequestError(KvlensError, ValueError):
    """A run was asked for in a way that cannot be carried out."""


class ModelError(KvlensError, ValueError):
    """A model cannot be run."""


class RunError(KvlensError, LookupError):
    """A stored run is missing, busy, unreadable, or cannot be repeated."""


class MachineError(KvlensError, RuntimeError):
    """The machine has too little memory, or lacks a feature."""


class Interrupted(KeyboardInterrupt):
    """The user stopped the run. What was recorded by then is stored."""

    code = "interrupted"

    def __init__(self, sentence: str, uid: str | None = None) -> None:
        """uid: of the run that was stored; None: the sentence names what was stored, if anything."""
        super().__init__(sentence)
        self.values = {"uid": uid}


def unknown_name(code: str, kind: str, name: object, names: list[str]) -> RequestError:
    """Return the error for a name that does not exist, with the names that are close to it."""
    close = get_close_matches(str(name), names, 3, 0.5)
    hint = f"the nearest is {' or '.join(close)}" if close else f"there are {', '.join(names) or 'none'}"
    return RequestError(code, f"{kind} '{name}' is not known: {hint}.", name=name, close=close, known=names)


@contextmanager
def translated() -> Iterator[None]:
    """Inside, what the core raises becomes a KvlensError. Errors of kvlens's own making pass unchanged."""
    try:
        yield
    except KvlensError:
        raise
    except Exception as error:
        translation = _translate(error)
        if translation is None:
            raise
        raise translation from None


def _translate(error: Exception) -> KvlensError | None:
    """Return the error in the API's words; None for an error that is not the user's to mend."""
    from pydantic import ValidationError

    from kvlens.budget import BudgetInfeasible
    from kvlens.engine.objects import TokenizerMissing
    from kvlens.methods import UnknownMethod
    from kvlens.models.errors import UnsupportedModel
    from kvlens.observing.refusals import CannotObserve
    from kvlens.refusal import Refusal
    from kvlens.runs.repeat import CannotRepeat, ObjectMissing, ObservedRun
    from kvlens.shortage import Shortage
    from kvlens.store.errors import RunBusy, RunNotFound, SchemaTooNew, TraceError, UnreadableRun
    from kvlens.text.chat import BadTemplate
    from kvlens.text.fieldrules import fault_sentence, name_of
    from kvlens.text.prompts import BadPrompt

    if isinstance(error, BudgetInfeasible):
        return _infeasible(error)
    if isinstance(error, CannotObserve):
        return RequestError(error.code, str(error), **error.values)
    if isinstance(error, ValidationError):
        fault = error.errors()[0]
        sentence, name = in_python(fault_sentence(error)), name_of(fault) or "request"
        return RequestError("bad_value", sentence, name=name, value=fault["input"])
    kinds: list[tuple[type[Exception], type[KvlensError], str]] = [
        (TokenizerMissing, ModelError, "tokenizer_missing"),
        (UnsupportedModel, ModelError, "unsupported_model"),
        (UnknownMethod, RequestError, "unknown_method"),
        (BadPrompt, RequestError, "bad_prompt"),
        (BadTemplate, RequestError, "template_failed"),
        (Shortage, MachineError, "machine_too_small"),
        (ObjectMissing, RunError, "model_object_missing"),
        (ObservedRun, RunError, "observed_run"),
        (CannotRepeat, RunError, "cannot_repeat"),
        (RunNotFound, RunError, "unknown_run"),
        (RunBusy, RunError, "run_busy"),
        (SchemaTooNew, RunError, "run_too_new"),
        (UnreadableRun, RunError, "run_unreadable"),
        (TraceError, RunError, "trace_failed"),
        (ValueError, RequestError, "bad_request"),
    ]
    for raised, kind, code in kinds:
        if isinstance(error, raised):
            values = getattr(error, "values", None)
            named = dict(values) if isinstance(values, dict) else {}
            detail = named.pop("code", getattr(error, "code", "")) or code
            if type(error) not in (raised, Refusal):
                return kind(detail, in_python(str(error)), **named)
            shown = getattr(type(error), "code", "") or code  # one code for all errors of this class
            return kind(shown, in_python(str(error)), **named, **({} if detail == shown else {"detail": detail}))
    return None


def _infeasible(error: Any) -> RequestError:
    """The budget is too small for the method."""
    instead = ", ".join(f'{name}="{value}"' for name, value in error.would_do.items())
    advice = f"pass {instead}" if instead else "choose other parameters or another method"
    return RequestError(
        "budget_infeasible",
        f"the budget is {error.budget:,} bytes ({error.budget / error.full:.1%} of full KV), the method needs at least "
        f"{error.smallest:,} ({error.smallest / error.full:.1%}) for this prompt: {advice}.",
        budget_bytes=error.budget,
        smallest_bytes=error.smallest,
        full_kv_bytes=error.full,
        likely_bytes=error.likely,
        would_do=dict(error.would_do),
    )
