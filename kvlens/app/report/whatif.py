"""The section on a what-if: what was held, dropped or asked for otherwise, and what that changed against the run it
repeats."""

from __future__ import annotations

from collections.abc import Sequence

from kvlens.app.report.markup import paragraph, table
from kvlens.budget import NO_LIMIT
from kvlens.lens.hold_changes import describe_kept, new_holds
from kvlens.lens.tries import outcome
from kvlens.meta import RunMeta
from kvlens.metaparts import Counterfactual, Held
from kvlens.store.reader import TraceError, TraceReader
from kvlens.text.units import counted, si_bytes


def whatif(reader: TraceReader) -> tuple[str, str]:
    """(title, HTML). Holds and drops that the repeated run had itself are no part of it, where that run can be read."""
    meta, repeated = reader.meta, _repeated(reader)
    holds = new_holds(meta.hold, () if repeated is None else repeated.hold)
    drops = new_holds(meta.drop, () if repeated is None else repeated.drop)
    kept_sentence = "" if repeated is None or not meta.changed else describe_kept(meta.hold, meta.drop, repeated)
    if not holds and not drops and not meta.changed:
        holds, drops = meta.hold, meta.drop  # a run that held or dropped something, repeated as it was
    came = meta.whatif or Counterfactual()
    where = "at the step of loss" if came.stands is None else f"at step {came.step}"
    changed: list[tuple[str, object, object]] = [
        (f"KL {where} (nats)", came.kl_before, came.kl_after),
        ("answer", came.answer_before, came.answer_after),
    ]
    if came.lifted_tokens:
        changed.append(("drop lifted", "nothing", f"{counted(came.lifted_tokens, 'token')}, {si_bytes(0)}"))
    if holds and (came.held_tokens or not came.lifted_tokens):
        changed.append(("held, beyond the budget", "nothing", si_bytes(came.held_bytes)))
    if "budget" in meta.changed or not (holds or drops):
        changed.append(("budget", "not recorded" if repeated is None else _budget(repeated), _budget(meta)))
    otherwise = table(("asked for otherwise", "as"), list(meta.changed.items())) if meta.changed else ""
    title = "Repeated with other settings"
    if holds or drops:
        title = "Repeated with a hold" if holds else "Repeated with a drop"
    if holds and drops:
        title = "Repeated with a hold and a drop"
    return (
        title,
        paragraph(_describe_outcome(came), "verdict")
        + otherwise
        + (paragraph(f"With {kept_sentence}, as in the run it repeats.", "note") if kept_sentence else "")
        + _ranges("held exactly", holds)
        + _ranges("dropped, not attended", drops)
        + table(("", "before", "in this run"), changed),
    )


def _describe_outcome(came: Counterfactual) -> str:
    back = came.restored if came.stands is None else came.stands
    if back is not None and (not came.answer_known or (came.held_tokens and came.dropped_tokens)):
        subject = "The answer:" if came.answer_known else "Its tokens, beside full KV's:"
        return f"{subject} {outcome(came).removeprefix('it is ')}."
    if came.stands is not None:
        return "The answer stands without it." if came.stands else "The answer hangs on it: without it, it is lost."
    if came.restored is None:
        return "Whether the answer came back is not known."
    return "The answer came back." if came.restored else "The answer did not come back."


def _ranges(title: str, ranges: Sequence[Held]) -> str:
    """A table of what was held or dropped; nothing where there is none."""
    rows = [
        (
            f"span {token_range.span}",
            f"tokens {token_range.tok_start}–{token_range.tok_end - 1}",
            f"from step {token_range.from_step}",
            ", ".join(f"L{layer} KV{head}" for layer, head in token_range.heads),
        )
        for token_range in ranges
    ]
    return table((title, "tokens", "when", "for"), rows) if rows else ""


def _repeated(reader: TraceReader) -> RunMeta | None:
    """Of the run that this one repeats; None where it is not beside it or cannot be read."""
    if not reader.meta.parent:
        return None
    try:
        with TraceReader.open(reader.runs_dir, reader.meta.parent) as parent:
            return parent.meta
    except TraceError:
        return None


def _budget(meta: RunMeta) -> str:
    return NO_LIMIT if meta.budget_bytes is None else si_bytes(meta.budget_bytes)
