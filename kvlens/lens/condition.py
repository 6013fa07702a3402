"""The condition of a figure in one line, the same in every header and export: model, prompt tokens, whether the
question was known, budget, n."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvlens.lens.knob import held_to
from kvlens.meta import RunMeta
from kvlens.models.find import short_model
from kvlens.store.reader import TraceReader
from kvlens.text.units import counted

KNOWN, AFTER, INSIDE = "question known", "question after", "question in the prompt"
"""the question was read with the context, or fed once the context was placed; or the prompt does not say where its
question begins, so that it was read with all else"""
CARRIED, ANEW = "turns carried", "turns anew"
"""of a conversation: the first turn was placed and the others were fed to its cache, or the history was read anew"""
MOST_NAMES = 3
"""models or budgets that a line names; more are counted"""


def question_words(meta: RunMeta) -> str:
    """Return `AFTER` if the run was fed its question once the context was placed, else `KNOWN`, or `INSIDE` if the
    prompt, of no task, does not say where its question begins."""
    stated = meta.task is not None or meta.question_start is not None
    return AFTER if meta.question == "after" or meta.asked_steps else KNOWN if stated else INSIDE


def turns_words(meta: RunMeta) -> str:
    """Return `CARRIED` or `ANEW` of a run of a conversation with earlier turns, '' of another one."""
    request = meta.request or {}
    return "" if not request.get("turns") else CARRIED if request.get("carried") else ANEW


def asked_condition(
    model: str, prompt_tokens: int | None, question: str, limits: Sequence[str], turns: str = "", stated: bool = True
) -> str:
    """Return the condition of a run, or of the lanes of a race, that is asked for: 'smollm2 · 639 prompt tokens ·
    question known · budget 20% · n = 1'.

    Args:
        prompt_tokens: None: not known before the model is loaded.
        question: in | after.
        limits: what each run is held to, as `held_to` says it.
        turns: `CARRIED` or `ANEW` of a conversation with earlier turns.
        stated: the prompt is of a task, or says where its question begins.
    """
    parts = (
        short_model(model),
        token_words([] if prompt_tokens is None else [prompt_tokens]),
        AFTER if question == "after" or turns == CARRIED else KNOWN if stated else INSIDE,
        turns,
        listed(limits, "budgets"),
        count_words([1]) + (f" ({len(limits)} runs)" if len(limits) > 1 else ""),
    )
    return " · ".join(part for part in parts if part)


def condition(runs: Sequence[TraceReader]) -> str:
    """Return 'smollm2 · 639 prompt tokens · question known · budget 20% · n = 1' of one run or of several. n counts the
    prompts; several runs are counted beside it. '' without runs."""
    if not runs:
        return ""
    metas = [run.meta for run in runs]
    prompts = len({meta.prompt_sha256 or meta.run_uid for meta in metas})
    count = f"n = {prompts:,}" + (f" ({len(metas):,} runs)" if len(metas) > 1 else "")
    tokens = [run.prompt_tokens() + run.meta.asked_steps for run in runs]
    parts = (
        listed((short_model(str(meta.model)) for meta in metas if meta.model), "models"),
        token_words(tokens),
        listed((question_words(meta) for meta in metas), "forms of the question"),
        listed((words for meta in metas if (words := turns_words(meta))), "ways of turns"),
        listed((held_to(meta) for meta in metas), "budgets"),
        count,
    )
    return " · ".join(part for part in parts if part)


def token_words(tokens: Sequence[int]) -> str:
    """Return '639 prompt tokens', or '384–1,024 prompt tokens' of several prompts; '' where none is known."""
    if not tokens:
        return ""
    low, high = min(tokens), max(tokens)
    return counted(low, "prompt token") if low == high else f"{low:,}–{high:,} prompt tokens"


def count_words(counts: Sequence[int]) -> str:
    """Return 'n = 30', or 'n = 13–30' where counts differ; counts: prompts, at least one."""
    least, most = min(counts), max(counts)
    return f"n = {most:,}" if least == most else f"n = {least:,}–{most:,}"


def listed(names: Iterable[str], many: str) -> str:
    """Return the different names in their order, joined by commas; '5 budgets' where there are more than
    `MOST_NAMES`."""
    different = list(dict.fromkeys(names))
    return ", ".join(different) if len(different) <= MOST_NAMES else f"{len(different)} {many}"
