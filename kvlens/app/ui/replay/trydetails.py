"""What a tried repeat was made of: its changes, in the order of the form."""

from __future__ import annotations

from kvlens.app.ui.common import data
from kvlens.lens.tries import Try
from kvlens.meta import RunMeta
from kvlens.text.plaintext import visible
from kvlens.text.units import counted, si_bytes


def more_bytes(trial: Try, repeated: RunMeta | None) -> int | None:
    """Device bytes beyond the run that was tried on; None where they are not known."""
    if repeated is not None:
        return trial.more_bytes(repeated.budget_bytes)
    return None if trial.summary is None or "budget" in trial.changed else trial.summary.held_bytes


def made_of(trial: Try, repeated: RunMeta | None) -> str:
    """What the bytes are made of, and a share of."""
    summary = trial.summary
    if summary is None or (held := summary.held_bytes) is None:
        return "Its bytes were not recorded."
    if trial.drops and not trial.holds and not trial.changed:
        heads = (
            f"{len(trial.heads)} of {trial.all_heads} KV heads"
            if len(trial.heads) < trial.all_heads
            else "all KV heads"
        )
        return f"not attended by {heads} · the tokens stay stored, no byte is freed"
    if not trial.holds:
        return (
            "" if not (trial.full_kv_bytes and trial.budget) else f"{trial.budget / trial.full_kv_bytes:.1%} of full KV"
        )
    parts = [f"{counted(summary.lifted_tokens, 'token')} attended again, 0 B"] if summary.lifted_tokens else []
    if summary.held_tokens or not parts:
        heads_held = len({head for hold in trial.holds for head in hold.heads})
        parts.append(
            f"{summary.held_tokens} tokens in {counted(heads_held, 'KV head')}, keys and values without tables"
        )
        if repeated is not None and data.keeps_all(str(repeated.method)):
            parts.append("a copy: the method keeps these tokens on the device anyway")
    parts += [f"{counted(summary.dropped_tokens or 0, 'token')} dropped"] if trial.drops else []
    if "budget" in trial.changed:
        parts.append(f"{si_bytes(held)} held")
        if repeated is None:
            return " · ".join([*parts, "the change of the budget is not known"])
        raised = trial.raised_bytes(repeated.budget_bytes)
        parts.append(f"{si_bytes(abs(raised))} {'less' if raised < 0 else 'more'} of budget")
    more, budget = more_bytes(trial, repeated), trial.budget_bytes if repeated is None else repeated.budget_bytes
    if more is not None and trial.full_kv_bytes:
        parts.append(f"{more / trial.full_kv_bytes:.2%} of full KV")
    if more is not None and budget:
        parts.append(f"{more / budget:.1%} on top of the budget")
    return " · ".join(parts)


def line(text: object) -> str:
    return "not recorded" if text is None else " ".join(visible(text).split()) or "nothing"


def nats_text(value: float | None) -> str:
    if value is None:
        return "not recorded"
    return "< 0.001" if 0 < value < 0.001 else f"{value:.3g}"
