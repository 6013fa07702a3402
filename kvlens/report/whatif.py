"""The section on a what-if: what was held or asked for otherwise, and what that changed against the run it repeats."""

from __future__ import annotations

from kvlens.lens.beyond import beyond
from kvlens.meta import Counterfactual, RunMeta
from kvlens.report.markup import paragraph, table
from kvlens.store.reader import TraceError, TraceReader
from kvlens.text.units import si_bytes


def whatif(reader: TraceReader) -> tuple[str, str]:
    """(title, HTML). Holds that the repeated run had itself are no part of it, where that run can be read."""
    meta, repeated = reader.meta, _repeated(reader)
    holds = beyond(meta.hold, () if repeated is None else repeated.hold)
    if not holds and not meta.changed:
        holds = meta.hold  # a run that held something, repeated as it was
    rows = [
        (
            f"span {hold.span}",
            f"tokens {hold.tok_start}–{hold.tok_end - 1}",
            f"from step {hold.from_step}",
            ", ".join(f"L{layer} KV{head}" for layer, head in hold.heads),
        )
        for hold in holds
    ]
    came = meta.whatif or Counterfactual()
    changed: list[tuple[str, object, object]] = [
        ("KL at the step of loss (nats)", came.kl_before, came.kl_after),
        ("answer", came.answer_before, came.answer_after),
    ]
    if holds:
        changed.append(("held, beyond the budget", "nothing", si_bytes(came.held_bytes)))
    if not holds or "budget" in meta.changed:
        changed.append(("budget", "not recorded" if repeated is None else _budget(repeated), _budget(meta)))
    restored = came.restored
    said = "Whether the answer came back is not known."
    if restored is not None:
        said = "The answer came back." if restored else "The answer did not come back."
    otherwise = table(("asked for otherwise", "as"), list(meta.changed.items())) if meta.changed else ""
    return (
        "What if it had been there" if holds else "What if it had been asked for otherwise",
        paragraph(said, "verdict")
        + otherwise
        + (table(("held exactly", "tokens", "when", "for"), rows) if rows else "")
        + table(("", "before", "in this run"), changed),
    )


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
    return "no limit" if meta.budget_bytes is None else si_bytes(meta.budget_bytes)
