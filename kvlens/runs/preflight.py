"""What a run would take, before anything is loaded: arithmetic over the model's config and a count of the prompt's
tokens.

Figures from here are estimates and are labelled so wherever they are shown. No torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from kvlens import methods
from kvlens.budget import BudgetInfeasible
from kvlens.methods.advice import refusal
from kvlens.methods.fitting import Chosen, Sizes, prompt_kept
from kvlens.models.errors import UnsupportedModel
from kvlens.models.find import ready
from kvlens.models.sizes import NUMBER_BYTES, ModelBeyondMemory, check_memory, sizes_in
from kvlens.recording.sampling import resolve as resolve_sampling
from kvlens.runs.memory import (
    MemoryNeed,
    attended_share,
    attending,
    attending_sentence,
    check_run_memory,
    is_kept,
    memory_need,
    resized,
    room_made,
    with_room,
)
from kvlens.runs.preparing import advice, check, choose_parameters
from kvlens.runs.request import AUTO, RunRequest, default_preset
from kvlens.shape import KVShape
from kvlens.tasks.encoding import encoding_in, first_turn_tokens
from kvlens.text.prompts import BadPrompt, PromptText, question_start

TRACE_ROW_BYTES = 300
"""stored bytes per (step, layer, query head), with top spans and full attention by span, beside what follows. A round
figure: five methods on the demo model (509 prompt tokens, 150 steps, schema 11) took 67 to 96 % of the estimate"""
DECISION_BYTES = 16
"""stored bytes per row of the table decision, with the lists of refused and missed spans. Events that come with a
decision take more: the run of the five above with most events took 109 bytes a row beside full KV's"""
TRACE_BASE_BYTES = 1_100_000
TOKEN_BYTES = 120
"""of a trace per prompt token, as measured on the demo model from 246 to 1,999 tokens: most of it are keys of spans"""
SPAN_TOKENS = 16
"""tokens of a span whose mean key is stored, for each layer and KV head, as float32"""
UNKNOWN = (
    "prompt_tokens",
    "full_kv_bytes",
    "budget_bytes",
    "min_budget_bytes",
    "feasible",
    "trace_bytes",
    "step_bytes",
    "memory_bytes",
    "steps",
    "room",
    "prompt_kept",
    "oracle_every",
    "preset",
    "fit",
    "values",
    "config",
    "instead",
)
"""what is None until the model can be asked"""


@dataclass(frozen=True)
class Foreseen:
    """What is known of a run before its model is loaded."""

    sizes: Sizes
    positions: int
    """tokens that the model takes"""
    asked: int = 0
    """tokens of a question that is fed after the context was placed: steps of the run"""

    @property
    def tokens(self) -> int:
        """Of the prompt, question, chat form and answer's prefix included."""
        return self.sizes.prompt_tokens + 1 + self.asked


def foresee(request: RunRequest, prompt: PromptText) -> Foreseen | str:
    """Sizes of a run; a sentence where they are not known before the model is loaded. Raises ValueError with one
    sentence for a model that is not there, a chat form that cannot be had, or a wrong budget."""
    _, budget = check(request)
    source = ready(request.model)
    if source is None:
        return f"'{request.model}' has not been converted yet: its size is known when it has been loaded once."
    if not is_kept(request):
        check_memory(source, request.model, request.dtype if request.dtype in NUMBER_BYTES else "float32")
    shape, positions = sizes_in(source, NUMBER_BYTES.get(request.dtype, 4))
    if not (source / "tokenizer.json").is_file():
        return "The model has no tokenizer.json: its tokens can be counted only when it has been loaded."
    form = request.chat, request.system, request.turns, request.chat_args
    counted = encoding_in(source, *form)
    tokens = counted.special + len(counted.encode(prompt.text)) + len(counted.encode(prompt.answer_prefix))
    limit = budget.bytes(shape, tokens + request.max_new)
    question_tokens = 0
    if request.carried:
        question_tokens = tokens - first_turn_tokens(source, *form)
    elif request.question == "after" and prompt.question is not None:
        question_tokens = sum(
            len(counted.encode(text)) for text in (prompt.text[prompt.question :], prompt.answer_prefix)
        )
    sizes = Sizes(shape, max(1, tokens - question_tokens - 1), question_tokens + request.max_new, limit)
    return Foreseen(sizes, positions, question_tokens)


def refuse(request: RunRequest, prompt: PromptText) -> MemoryNeed | None:
    """Return the memory that a run takes by estimate; None where only loading or reading can tell. Raises what
    arithmetic can tell of a run that would be refused, with what would work."""
    if request.question == "after" and not request.carried:
        question_start(prompt)
    request = attending(request)
    try:
        foreseen = foresee(request, prompt)
    except ModelBeyondMemory:
        raise
    except UnsupportedModel:
        return None  # loading says what is wrong with the model
    if isinstance(foreseen, str):
        return None
    request = with_room(request, foreseen.sizes)
    foreseen = replace(foreseen, sizes=resized(request, foreseen.sizes))
    run, sizes = choose_parameters(request, foreseen.sizes), foreseen.sizes
    if request.forced is not None:
        sizes = replace(sizes, max_new=len(request.forced))
    if methods.get(request.method).reach(run.params, sizes) > foreseen.positions:
        sentence = _too_long(foreseen, sizes.max_new - (foreseen.asked if request.forced is None else 0))
        raise BadPrompt(sentence, code="too_long", tokens=foreseen.tokens, most=foreseen.positions)
    refused = _refusal(request, run, foreseen.sizes)
    if refused is not None:
        raise refused
    return check_run_memory(request, foreseen.sizes)


def _refusal(request: RunRequest, found: Chosen, sizes: Sizes) -> BudgetInfeasible | None:
    method, usual = methods.get(request.method), default_preset(request.method, request.model)
    possible = sizes.may_hold(method, found.params)
    return None if possible else refusal(method, request.preset, usual, found, request.overrides, sizes)


def decision_rows(family: str, shape: KVShape) -> int:
    """Return the rows that a step of a method of some family adds to the table decision, at most: one per query head
    where query heads zoom, else one per KV head, in every layer."""
    if family == "reference":
        return 0
    return shape.layers * (shape.q_heads if family == "span_retrieval" else shape.kv_heads)


def estimate(
    prompt: PromptText | str,
    model: str,
    method: str,
    params: dict[str, Any],
    budget: str | None,
    max_new: int,
    preset: str | None = None,
    **form: Any,
) -> dict[str, Any]:
    """form: how the prompt is fed, as fields of RunRequest: chat, system, question, chat_args, turns, carried.

    Returns prompt_tokens, full_kv_bytes, budget_bytes (None: no limit), min_budget_bytes, feasible, trace_bytes,
    step_bytes (of the trace, of each step), memory_bytes (beside the weights, on a CPU), steps (at most), oracle_every,
    preset (which would be run), fit (why the preset `fit` would be run and what it comes to), values (of that preset,
    over the defaults), config (all parameters), instead (budget and preset that would work, where this would not), room
    (the sentence about a budget that was not given and is larger than usual), prompt_kept (tokens), warnings.

    oracle_every: full attention by span is recorded at every so many steps, in all layers. feasible: None where the
    method's floor is an estimate above the budget, so that only the run itself knows.
    Values are None where they are not known before the model is loaded (a GGUF file that was never converted). Raises
    ValueError with one sentence for an unknown model folder, method, preset, parameter or budget, and for figures of
    the model that are missing.
    """
    request = RunRequest(
        model=model, method=method, preset=preset, budget=budget, max_new=max_new, overrides=params, **form
    )
    source = PromptText(prompt) if isinstance(prompt, str) else prompt
    share = attended_share(method, request.budget, params)
    request = attending(request)
    foreseen = foresee(request, source)
    out: dict[str, Any] = dict.fromkeys(UNKNOWN) | {"warnings": []}
    if isinstance(foreseen, str):
        out["warnings"].append(foreseen)
        return out
    requested_budget, request = request.budget, with_room(request, foreseen.sizes)
    sizes, tokens = resized(request, foreseen.sizes), foreseen.tokens
    shape, limit, full = sizes.shape, sizes.budget_bytes, sizes.full_kv_bytes
    choice, kind = choose_parameters(request, sizes), methods.get(method)
    step_bytes = TRACE_ROW_BYTES * shape.layers * shape.q_heads + DECISION_BYTES * decision_rows(kind.family, shape)
    token_bytes = max(TOKEN_BYTES, 4 * shape.layers * shape.kv_heads * shape.head_dim // SPAN_TOKENS)
    sampled = resolve_sampling("auto", shape.layers, shape.q_heads, tokens)
    refused = _refusal(request, choice, sizes)
    fits = limit is None or choice.floor <= limit or requested_budget is None
    out |= {
        "prompt_tokens": tokens,
        "full_kv_bytes": full,
        "budget_bytes": limit,
        "min_budget_bytes": choice.floor,
        "feasible": True if fits else None if refused is None else False,
        "oracle_every": None if sampled is None else sampled.every,
        "trace_bytes": TRACE_BASE_BYTES + token_bytes * tokens + step_bytes * sizes.max_new,
        "step_bytes": step_bytes,
        "memory_bytes": memory_need(request, sizes).total,
        "steps": sizes.max_new,
        "prompt_kept": prompt_kept(kind, choice.params, sizes),
        "preset": choice.preset,
        "fit": choice.said,
        "values": choice.fitted,
        "config": asdict(choice.params),
        "room": room_made(request)
        if request.budget != requested_budget
        else share and attending_sentence(method, share),
    }
    if kind.reach(choice.params, sizes) > foreseen.positions:
        out["feasible"] = False
        out["warnings"].append(_too_long(foreseen, max_new))
    if not fits:
        would = advice(request, sizes, choice.floor)
        out["instead"] = {"budget": AUTO} if kind.keeps_all else would.would_do
        out["min_budget_bytes"] = would.likely or would.smallest
    if refused is not None:
        out["warnings"].append(str(refused).removeprefix("budget_infeasible: "))
    elif not fits and limit is not None:
        need = f"needs, by estimate, {out['min_budget_bytes'] / full:.1%} of full KV for this prompt; the budget is"
        out["warnings"].append(
            f"{kind.title} {need} {limit / full:.1%}: the run may be refused once its spans are known."
        )
    return out


def _too_long(found: Foreseen, steps: int) -> str:
    tokens = f"Prompt and output are {found.tokens + steps:,} tokens, the model takes {found.positions:,}"
    return f"{tokens}: shorten the prompt or lower --max-new."
