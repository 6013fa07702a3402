"""`kvlens.run` and `kvlens.open`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlens import methods
from kvlens.api.asking import BudgetLike, folder_of, method_name, one_budget, request_of, split_keywords
from kvlens.api.carrying import carrying, check_end
from kvlens.api.errors import translated
from kvlens.api.keywordtypes import check_flags
from kvlens.api.models import Given, Named, source_of
from kvlens.api.prompts import PromptLike
from kvlens.api.storedrun import Run
from kvlens.methods.base import Method


def run(
    text: PromptLike,
    method: str | type[Method] = methods.DEFAULT,
    budget: BudgetLike = None,
    *,
    budget_tokens: int | None = None,
    budget_bytes: int | None = None,
    preset: str | None = None,
    answer: str | None = None,
    needle: str | None = None,
    segments: Mapping[str, str | tuple[int, int]] | None = None,
    ask: str | None = None,
    model: Any = None,
    tokenizer: Any = None,
    device: str | None = None,
    dtype: str | None = None,
    against_full: bool = True,
    forced: bool = False,
    runs: str | Path | None = None,
    progress: bool = True,
    **keywords: Any,
) -> Run:
    """Run a prompt under a method, store the trace and return the run.

    Args:
        text: a text (str), a file (pathlib.Path), a kvlens prompt (`kvlens.sample()`), or chat messages
            ([{"role": "user", "content": ...}]).
        method: a name (`kvlens.methods()` lists them), or a class of your own (docs/adding-a-method.md).
        budget: KV bytes on the device: a share of full KV (0.2 or "20%"), tokens ("512tok") or bytes ("64MB").
        budget_tokens, budget_bytes: the same as a number, in place of budget.
        preset: a named set of the method's parameters, or "fit".
        answer: what a right output contains.
        needle: words of the prompt that hold the answer.
        segments: named parts of the prompt, each by a marker in the text or by (start, end) in characters.
        ask: a question about the text, which is then its context.
        model: a name, a folder, a .gguf file, what `load_model` returns, or a decoder loaded with transformers; None:
            the default model.
        tokenizer: of a model object.
        device, dtype: as for `load_model`.
        against_full: compare every step with full KV, which is run first where it is not stored.
        forced: feed full KV's tokens, so that all steps compare.
        runs: folder to store in; None: $KVLENS_RUNS, else ./runs.
        progress: show bars, for the run and for its repeats.
        keywords: settings (max_new, seed, temperature, top_p, stop, ignore_eos, chat, system, turns, question,
            trace_level, coverage, oracle, threads: kvlens.api.asking.Settings) and parameters of the method by their
            names.

    Raises:
        RequestError: `budget_twice`, `unknown_parameter`, `unknown_method`, `budget_infeasible`, `bad_prompt`, ...
        ModelError: `unsupported_model`, `tokenizer_missing`, `model_is_loaded`.
        Interrupted: Ctrl-C was pressed; what was recorded is stored.

    >>> run = kvlens.run(kvlens.sample("demo"), budget="30%", model="demo", max_new=12, progress=False)
    >>> run.verdict.outcome
    'lost'
    """
    from kvlens.runs.carrying import carry_out
    from kvlens.runs.conversing import answer_turns

    with translated():
        check_flags(against_full=against_full, forced=forced)
        name = method_name(method)
        budget_limit = one_budget(budget, budget_tokens, budget_bytes)
        settings, parameters = split_keywords(name, keywords, inspect.signature(run).parameters)
        models, fields = source_of(model, tokenizer, device, dtype)
        request, conversation = request_of(
            text,
            fields,
            method=name,
            preset=preset,
            budget=budget_limit,
            parameters=parameters,
            ask=ask,
            answer=answer,
            needle=needle,
            segments=segments,
            **settings,
        )
    compared = (against_full and name != methods.REFERENCE) or forced
    request = request.model_copy(update={"against": compared, "forced_reference": forced})
    folder = folder_of(runs)
    with carrying(models, progress) as job:
        bars = job.progress
        context = folder, bars.report, job.cancelled, bars.say, models
        cancelled = None
        if "turns" in settings:
            request, cancelled = answer_turns(
                request, conversation.prompt, lambda turn, text: carry_out(turn, text, *context)
            )
        uid, status, _ = cancelled or carry_out(request, conversation.prompt, *context)
    stored_run = Run(folder, uid, models, progress)
    check_end(stored_run.reader, status)
    return stored_run


def open_run(
    run: str | Path, *, runs: str | Path | None = None, model: Any = None, tokenizer: Any = None, progress: bool = True
) -> Run:
    """Return a stored run.

    Args:
        run: its uid, or the path of its folder.
        runs: folder that it is stored in, of a uid; None: $KVLENS_RUNS, else ./runs.
        model, tokenizer: the objects it was made with, where it was made with a model object and is to be repeated.
        progress: repeats of the run show bars.

    Raises:
        RunError: `unknown_run`, `run_busy`, `run_unreadable`, `run_too_new`.
    """
    path = Path(run)
    if path.name == "trace.duckdb":
        path = path.parent
    if isinstance(run, Path) or (path / "trace.duckdb").is_file():
        folder, uid = path.resolve().parent, path.name
    else:
        folder, uid = folder_of(runs), str(run)
    models: Named | Given = Named() if model is None else source_of(model, tokenizer, None, None)[0]
    opened = Run(folder, uid, models, progress)
    opened.check()
    return opened
