"""The sections about one run."""

from __future__ import annotations

from typing import Any

from kvlens import tasks
from kvlens.app.report.markup import Figures, folded, paragraph, table, verbatim
from kvlens.app.report.runfigures import bytes_moved, head_maps, loss_over_steps, spans_at
from kvlens.app.report.strip import strip
from kvlens.app.report.trial_section import describe_trials
from kvlens.app.report.whatif import whatif
from kvlens.budget import NO_LIMIT
from kvlens.lens.answers import answer_sentence, full_right
from kvlens.lens.output import output_text
from kvlens.lens.severity import severity, unmissed_words
from kvlens.lens.verdict import Verdict, verdict
from kvlens.meta import RunMeta
from kvlens.methods.naming import installed_entry, run_name
from kvlens.recording import sampling
from kvlens.runs.modelcheck import verdict_words
from kvlens.store.amend import why_none
from kvlens.store.reader import TraceError, TraceReader
from kvlens.text.passages import passage
from kvlens.text.units import full_kv, si_bytes
from kvlens.text.windows import window_sentence
from kvlens.text.words import STATE_MEANINGS, STATES

#: Prompts are shown up to here, characters.
MOST_PROMPT = 40_000


def facts(reader: TraceReader) -> str:
    """What the run is."""
    meta = reader.meta
    budget, full = meta.budget_bytes, meta.full_kv_bytes
    limit = (
        NO_LIMIT
        if budget is None
        else si_bytes(budget) + (f", {budget / full:.1%} of {full_kv(meta.dtype)} ({si_bytes(full)})" if full else "")
    )
    kind = "forced: fed the reference's tokens" if meta.forced else "free: decodes on its own tokens"
    rows = [
        ("run", reader.uid),
        *_about_rows(reader),
        ("status", reader.status + (f" ({reader.error})" if reader.error else "")),
        ("started", meta.started),
        ("model", meta.model),
        ("method", _titled(meta)),
        ("preset", meta.preset or "none"),
        ("budget", limit),
        ("prompt", f"{reader.prompt_tokens()} tokens, task {meta.task or 'not named'}"),
        ("decode steps", reader.n_steps),
        ("decoding", kind),
        ("sampling", _sampling(meta)),
        ("full-KV reference", meta.reference or "none"),
        ("repeats run", meta.parent or "none"),
        ("held ranges", len(meta.hold) or "none"),
        *([("dropped ranges", len(meta.drop))] if meta.drop else []),
        *((f"asked for otherwise: {name}", value) for name, value in meta.changed.items()),
        ("layers, query heads, KV heads", f"{reader.n_layers}, {reader.q_heads}, {reader.kv_heads}"),
    ]
    return table(("what", "value"), rows)


def _sampling(meta: RunMeta) -> str:
    """Return the settings of sampling, each with its value or "not recorded"."""
    values = (("temperature", meta.temperature), ("top-p", meta.top_p), ("seed", meta.seed))
    return ", ".join(f"{name} {'not recorded' if value is None else value}" for name, value in values)


def _about_rows(reader: TraceReader) -> list[tuple[str, str]]:
    """Its name, tags and note, where it has any."""
    try:
        run_about = reader.about()
    except TraceError as problem:
        return [("name, tags and note", str(problem))]
    rows = (("name", run_about.name), ("tags", ", ".join(run_about.tags)), ("note", run_about.note))
    return [(label, text) for label, text in rows if text]


def _titled(meta: RunMeta) -> str:
    return f"{run_name(meta)} ({meta.method})" if about(meta) else run_name(meta)


def about(meta: RunMeta) -> dict[str, Any] | None:
    """The catalogue's entry of the run's method; None when it is not installed here."""
    return installed_entry(str(meta.method))


def verdict_text(reader: TraceReader, found: Verdict | None) -> str:
    """What was lost and what was missed most there, from recorded columns; or why nothing can be said."""
    if found is None:
        loss, answer = reader.loss(), answer_sentence(reader.meta)
        if len(loss):
            return paragraph(
                f"Nothing was lost: at all {len(loss)} steps compared, the most probable token is full KV's.{answer}",
                "calm",
            )
        if reader.meta.method == "full":
            return paragraph(f"This run is full KV itself, so there is nothing to compare it with.{answer}", "calm")
        return paragraph("The loss against full KV was not recorded in this run.", "calm")
    how = severity(reader, found)
    means = f"; {how.sentence()}" if how.sentence() else ""
    text = (
        f"{how.headline(found.step)}: full KV says {found.expected!r}, this run {found.got!r}{means}; "
        f"{found.loss_words()}. Moved to the device at this step: {si_bytes(found.h2d_bytes)}."
    )
    paragraphs = [paragraph(text, "verdict")]
    if (missed := found.missed) is None:
        paragraphs.append(paragraph(f"What was missed there: {unmissed_words(found, how)}."))
    else:
        where = "not recorded" if missed.state is None else f"{STATES[missed.state]} ({STATE_MEANINGS[missed.state]})"
        tokens = reader.tokens()
        words = passage(tokens, missed.tok_start, missed.tok_end)[:160]
        effect = f"; {missed.effect_words()}" if missed.effect_words() else ""
        why = why_none(reader.runs_dir / reader.uid, reader.meta.no_effects)
        if not effect and why:
            effect = f"; by regret, since effects on the choice were not recorded: {why}"
        heads = f"L{missed.layer} KV{missed.kv_head} (query head Q{missed.q_head} most)"
        paragraphs.append(
            paragraph(
                f"Missed most by {heads}: span {missed.span}, {missed.kind}, tokens "
                f"{missed.tok_start}–{missed.tok_end - 1}, {words!r}. "
                f"Of attention: {missed.mass_words(3)}{missed.regret_words(3)}{effect}. Its state for this KV "
                f"head: {where}. Why it was not attended exactly: {missed.reason.says}. Of the bytes moved at the step "
                f"{si_bytes(missed.h2d_bytes)} were known to be its own."
            )
        )
    return "".join(paragraphs)


def answer(reader: TraceReader) -> str:
    """What was expected and what came, and what full KV answered; of a forced run, what it was fed: those tokens say
    nothing about the method."""
    meta, output = reader.meta, output_text(reader)
    forced = bool(meta.forced)
    rows = [("fed, full KV's tokens" if forced else "generated", output)]
    if meta.answer:
        exact = tasks.judged(meta.task, str(meta.answer), output, meta.answers)
        right = {True: "yes", False: "no", None: "not judged: the task's score cannot be computed here"}[exact]
        right = "not judged: the method did not choose these tokens" if forced else right
        rows = [("expected", str(meta.answer).strip()), *rows, ("right", right)]
    else:
        rows.append(("expected", "no answer is known for this prompt"))
    if meta.reference_output is not None:
        rows += [] if forced else [("full KV generated", meta.reference_output)]
        full = full_right(reader)
        rows += [] if full is None else [("full KV's right", "yes" if full else "no")]
    prompt = reader.prompt_text()
    cut = "" if len(prompt) <= MOST_PROMPT else f"\n… {len(prompt) - MOST_PROMPT:,} more characters"
    shown = folded(f"The prompt, {len(prompt):,} characters", verbatim(prompt[:MOST_PROMPT] + cut)) if prompt else ""
    return table(("", "text"), rows) + shown


def parameters(reader: TraceReader) -> str:
    """The method's parameters as they were in force, and which of them the paper does not decide."""
    entry, config = about(reader.meta), reader.meta.config
    if not config:
        return paragraph("The method has no parameters.")
    described = {item["name"]: item for item in (entry or {}).get("parameters", [])}
    printed = ((entry or {}).get("presets") or {}).get("paper") or {}
    rows = []
    for name, value in config.items():
        item = described.get(name) or {}
        origin = "not described here" if not item else "our decision" if item.get("ours") else "the paper"
        paper = printed.get(name, item.get("default"))
        if origin == "the paper" and value != paper:
            origin = f"this run, instead of the paper preset's {_switch(paper)}"
        rows.append((name, _switch(value), item.get("symbol") or "", origin, item.get("doc") or ""))
    intro = paragraph(f"{entry['title']} {entry['summary']}. Paper: {entry['paper']}") if entry else ""
    return intro + table(("parameter", "value", "symbol", "decided by", "meaning"), rows)


def conditions(reader: TraceReader) -> str:
    """Versions, machine, self-checks."""
    meta = reader.meta
    names = (
        "kvlens",
        "torch",
        "transformers",
        "kernels",
        "device",
        "dtype",
        "link",
        "trace_level",
        "coverage",
        "schema_version",
    )
    rows = [(name.replace("_", " "), _switch(value)) for name, value in meta.pick(names).items()]
    rows.append(("the model's own generate", verdict_words(meta.model_check)))
    rows += [("sliding windows", window_sentence(meta.windows))] if meta.windows else []
    rows.append(("full attention by span", sampling.words(meta.oracle, reader.n_layers)))
    rows += [("machine", None)] if meta.machine is None else list(meta.machine.to_row().items())
    checks = reader.self_checks()
    passed = [
        (str(row.name_), "pass" if row.passed else "FAIL", str(row.detail))
        for row in checks.rename(columns={"name": "name_"}).itertuples()
    ]
    check_table = (
        table(("self-check", "result", "detail"), passed) if passed else paragraph("Self-checks: not recorded.")
    )
    return table(("condition", "value"), rows) + check_table


def _switch(value: Any) -> Any:
    """A switch as methods' parameters speak of it."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def one_run(reader: TraceReader, figures: Figures) -> list[tuple[str, str]]:
    """(title, HTML) of every section, in order."""
    loss = verdict(reader)
    counterfactual = [whatif(reader)] if reader.meta.interfered or reader.meta.changed else []
    proof = [("What was tried on it", trial_html)] if (trial_html := describe_trials(reader)) else []
    return [
        ("Verdict", verdict_text(reader, loss)),
        ("What the run is", facts(reader)),
        ("The answer", answer(reader)),
        *counterfactual,
        *proof,
        ("The text at the step of loss", strip(reader, loss)),
        ("What was lost, step by step", loss_over_steps(reader, figures, loss)),
        ("Which spans were missed", spans_at(reader, figures, loss)),
        ("Which heads", head_maps(reader, figures, loss)),
        ("Memory and copies", bytes_moved(reader, figures)),
        ("The method's parameters", parameters(reader)),
        ("Versions, machine, self-checks", conditions(reader)),
    ]
