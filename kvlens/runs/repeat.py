"""Repeating a stored run: what it was, read back from its trace, and the checks that it is the same model and prompt
again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlens import methods
from kvlens.budget import WHOLE, Budget
from kvlens.holds import Drop, Hold
from kvlens.meta import RunMeta
from kvlens.metaparts import OBJECT
from kvlens.refusal import Refusal
from kvlens.rows import SpanRow
from kvlens.runs.preparing import Prepared, prepare
from kvlens.runs.request import BY_NAME, ModelSource, Report, RunRequest
from kvlens.runs.storedprompt import stored_prompt
from kvlens.store.cells import integer, number
from kvlens.store.reader import TraceReader
from kvlens.text.chat import ChatForm
from kvlens.text.prompts import PromptText

_OLD = (
    "model",
    "method",
    "preset",
    "budget",
    "max_new",
    "seed",
    "temperature",
    "top_p",
    "device",
    "dtype",
    "coverage",
    "trace_level",
)
"""what a trace says of its request without keeping the request whole (kvlens before the lens)"""


class CannotRepeat(Refusal):
    """Why a stored run cannot be repeated, in one sentence."""


class ObjectMissing(CannotRepeat):
    """The run was made with a model object, which no name on this machine stands for."""


class ObservedRun(CannotRepeat):
    """The run was observed: only the caller's own code can generate it again."""


@dataclass(frozen=True)
class Past:
    """A stored run, as far as repeating it needs."""

    uid: str
    request: RunRequest
    """with the whole configuration as overrides, and the holds and drops it had"""
    asked: RunRequest
    """as it was asked for: what a preset chose is not said, and is chosen anew; of an old trace equal to `request`"""
    source: PromptText
    form: ChatForm | None
    """the text around the prompt as it was fed; None: the text as it is"""
    ids: tuple[int, ...]
    """of the prompt's tokens"""
    spans: tuple[SpanRow, ...]
    layers: int
    kv_heads: int
    steps: int
    text: str
    """what it generated (or was fed)"""
    whole: bool
    """it ran to its end"""
    forced: bool
    """fed its reference's tokens"""
    fingerprint: str | None
    """of the model; None: an old trace does not say"""
    losses: dict[int, tuple[bool, float]]
    """step -> (agrees, KL in nats), where it was compared with full KV"""
    from_object: bool = False
    """a caller handed in the loaded model"""

    @property
    def positions(self) -> int:
        """Tokens that went through the model: step 0 feeds the prompt's last one."""
        return len(self.ids) - 1 + self.steps

    def otherwise(self, changed: Mapping[str, str]) -> RunRequest:
        """The request with another `budget`, another `method` or other parameters, by name. The parameters that were
        asked for stay, those that a preset chose are chosen anew; with nothing changed it is `request`. Raises
        ValueError with one sentence."""
        if not changed:
            return self.request
        values = dict(changed)
        replaced = {name: values.pop(name, getattr(self.asked, name)) for name in ("budget", "method")}
        overrides = {**self.asked.overrides, **values}
        return RunRequest.model_validate({**self.asked.model_dump(), **replaced, "overrides": overrides})

    def with_finer(self, changed: Mapping[str, str]) -> RunRequest:
        """Return the request with `finer` and the raised budget; all other parameters stay as they ran. Raises
        ValueError with one sentence."""
        values = dict(changed)
        budget = values.pop("budget", self.request.budget)
        overrides = {**self.request.overrides, **values}
        return RunRequest.model_validate({**self.request.model_dump(), "budget": budget, "overrides": overrides})


def read_run(runs_dir: Path, uid: str) -> Past:
    """Raises TraceError for a run that cannot be read, CannotRepeat for one that does not say what it was."""
    with TraceReader.open(runs_dir, uid) as reader:
        meta, tokens, spans, text, loss = (
            reader.meta,
            reader.tokens(),
            reader.span_rows(),
            reader.prompt_text(),
            reader.loss(),
        )
        steps, layers, kv_heads, whole = reader.n_steps, reader.n_layers, reader.kv_heads, reader.status == "completed"
    check_steered(uid, meta)
    if not steps:
        sentence = f"run {uid} cannot be repeated: it ended before its first decode step; run its prompt again."
        raise CannotRepeat(sentence, code="no_steps", uid=uid)
    if not text:
        raise CannotRepeat(
            f"run {uid} cannot be repeated: its prompt's text was not stored with it.", code="no_prompt_text", uid=uid
        )
    if meta.forced and not meta.reference:
        raise CannotRepeat(
            f"run {uid} cannot be repeated: it was fed tokens that are neither its own nor those of a stored reference."
        )
    prompt, decoded = tokens[tokens["step"].isna()], tokens[tokens["step"].notna()].sort_values("step")
    request = _request(uid, meta)
    return Past(
        uid,
        request,
        _original_request(request, meta),
        stored_prompt(meta, text),
        None if not meta.chat else ChatForm.read_stored(meta.chat),
        tuple(prompt.sort_values("pos")["token_id"].tolist()),
        spans,
        layers,
        kv_heads,
        steps,
        meta.output_text or "".join(decoded["text"].iloc[meta.asked_steps :]),
        whole,
        bool(meta.forced),
        meta.model_fingerprint,
        {integer(row.step): (bool(row.agrees), number(row.kl)) for row in loss.itertuples()},
        meta.model_info is not None and meta.model_info.origin == OBJECT,
    )


def check_steered(uid: str, meta: RunMeta) -> None:
    """Raise CannotRepeat if kvlens did not carry out the run: another engine did, or the caller's own code
    (ObservedRun)."""
    if meta.imported is not None:
        raise CannotRepeat(
            f"run {uid} cannot be repeated: another engine carried it out ({meta.imported.engine}); run its prompt "
            "under a method of kvlens."
        )
    if meta.observed is not None:
        raise ObservedRun(
            f"run {uid} was observed, and kvlens does not steer what made it: run that code again inside "
            "kvlens.observe(model, tokenizer, repeat=run, hold=[...]). A budget or another method needs kvlens.run."
        )


def _request(uid: str, meta: RunMeta) -> RunRequest:
    """The run's request; what was compared or fed is not part of it."""
    if "config" not in meta.model_fields_set:
        raise CannotRepeat(
            f"run {uid} cannot be repeated: its trace does not say how it was made (no config).",
            code="no_config",
            uid=uid,
        )
    stored_fields = meta.request or {name: value for name, value in meta.pick(_OLD).items() if value is not None}
    # a trace from before the chat form was fed its text as it is
    config = _later_parameters(meta) | meta.config
    fields = {"chat": "off", **stored_fields, "overrides": config, "against": False, "forced_reference": False}
    fields["preset"] = meta.preset  # which one it came to, not which one was asked for
    fields["budget"] = _still_taken(fields.get("budget"), meta.budget_bytes)
    try:
        held, dropped = (
            (Hold(**token_range.to_row()) for token_range in meta.hold),
            (Drop(**token_range.to_row()) for token_range in meta.drop),
        )
        return RunRequest(**fields, hold=tuple(held), drop=tuple(dropped))
    except (TypeError, ValueError) as error:
        raise CannotRepeat(
            f"run {uid} cannot be repeated: its trace does not say how it was made ({type(error).__name__}).",
            code="no_config",
            uid=uid,
        ) from None


def _still_taken(budget: str | None, limit: int | None) -> str | None:
    """The budget of an older run, which may be a share above full KV: that was no limit, and is refused now."""
    try:
        Budget.parse(budget or WHOLE)
    except ValueError:
        return WHOLE if limit is None else budget
    return budget


def _original_request(request: RunRequest, meta: RunMeta) -> RunRequest:
    """The request before a preset was chosen and its numbers were filled in."""
    stored_fields = meta.request or {}
    if "overrides" not in stored_fields:
        return request
    overrides = _later_parameters(meta) | dict(stored_fields["overrides"] or {})
    return request.model_copy(update={"preset": stored_fields.get("preset"), "overrides": overrides})


def _later_parameters(meta: RunMeta) -> dict[str, Any]:
    """Return the parameters that the method got after the run was stored, with their defaults: a default is what the
    method did before, whatever a preset sets today."""
    if not meta.config:
        return {}
    fields = dataclasses.fields(methods.get(str(meta.method)).Parameters)
    return {field.name: field.default for field in fields if field.name not in meta.config}


def reload(past: Past, report: Report, models: ModelSource = BY_NAME) -> Prepared:
    """Load the run's model and tokenize its prompt again. Raises ValueError, one sentence, when they differ from what
    they were."""
    if past.from_object and models.named:
        raise ObjectMissing(
            f"run {past.uid} was made with a loaded model object: open it in Python with model= and tokenizer= to "
            "repeat it."
        )
    prepared = prepare(past.request, past.source, report, past.form, models)
    if past.fingerprint is not None and prepared.fingerprint != past.fingerprint:
        changed = "the weights of model" if past.from_object else "the files of model"
        raise CannotRepeat(
            f"run {past.uid} cannot be repeated: {changed} '{past.request.model}' have changed since; "
            "put the old ones back, or run anew."
        )
    if prepared.prompt.ids != past.ids:
        raise CannotRepeat(
            f"run {past.uid} cannot be repeated: the tokenizer of '{past.request.model}' cuts its prompt into other "
            "tokens than it did then."
        )
    return prepared
