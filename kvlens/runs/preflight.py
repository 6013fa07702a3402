"""What a run would take, before anything is loaded: arithmetic over the model's config and a count of the prompt's
tokens.

Figures from here are estimates and are labelled so wherever they are shown. No torch.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvlens import methods
from kvlens.memory.budget import Budget
from kvlens.models.errors import UnsupportedModel
from kvlens.models.find import ready
from kvlens.prompts import PromptText
from kvlens.recording.sampling import resolve as resolve_sampling
from kvlens.shape import KVShape
from kvlens.tasks.encoding import encoding_in

TRACE_ROW_BYTES = 100
"""stored bytes per (step, layer, query head), with top spans, as measured in docs/benchmarks.md"""
TRACE_BASE_BYTES = 1_100_000
UNKNOWN = (
    "prompt_tokens",
    "full_kv_bytes",
    "budget_bytes",
    "min_budget_bytes",
    "feasible",
    "trace_bytes",
    "oracle_every",
)
"""what is None until the model can be asked"""


def estimate(
    prompt: PromptText | str,
    model: str,
    method: str,
    params: dict[str, Any],
    budget: str | None,
    max_new: int,
    preset: str | None = None,
    chat: str = "auto",
    system: str | None = None,
    question: str = "in",
) -> dict[str, Any]:
    """prompt_tokens, full_kv_bytes, budget_bytes (None: no limit), min_budget_bytes, feasible, trace_bytes,
    oracle_every, warnings.

    oracle_every: full attention by span is recorded at every so many steps, in all layers.

    feasible is None where the method's floor is an estimate above the budget: only the run itself knows.

    Values are None where they are not known before the model is loaded (a GGUF file that was never converted). Raises
    ValueError with one sentence for an unknown model folder, method, preset, parameter or budget.
    """
    from kvlens.runs.request import default_budget, default_preset

    chosen = methods.get(method)
    parameters = methods.make_parameters(chosen, preset or default_preset(method, model), params)
    asked = Budget.parse(budget or default_budget(method))
    out: dict[str, Any] = dict.fromkeys(UNKNOWN)
    out["warnings"] = []
    source = ready(model)
    if source is None:
        out["warnings"].append(f"'{model}' has not been converted yet: its size is known when it has been loaded once.")
        return out
    shape, positions = _shape(str(source))
    if not (source / "tokenizer.json").is_file():
        out["warnings"].append(
            "The model has no tokenizer.json: its tokens can be counted only when it has been loaded."
        )
        return out
    asked_for = PromptText(prompt) if isinstance(prompt, str) else prompt
    counted = encoding_in(source, chat, system)
    tokens = counted.special + len(counted.encode(asked_for.text)) + len(counted.encode(asked_for.answer_prefix))
    full = shape.full_kv_bytes(tokens + max_new)
    limit = asked.bytes(shape, tokens + max_new)
    sampled = resolve_sampling("auto", shape.layers, shape.q_heads, tokens)
    context = tokens
    if question == "after" and asked_for.question is not None:
        context -= len(counted.encode(asked_for.text[asked_for.question :])) + len(
            counted.encode(asked_for.answer_prefix)
        )
    floor = chosen.floor_bytes(parameters, shape, max(1, context - 1), max_new + tokens - context)
    out |= {
        "prompt_tokens": tokens,
        "full_kv_bytes": full,
        "budget_bytes": limit,
        "min_budget_bytes": floor,
        "feasible": True if limit is None or floor <= limit else False if chosen.floor_is_exact else None,
        "oracle_every": None if sampled is None else sampled.every,
        "trace_bytes": TRACE_BASE_BYTES + TRACE_ROW_BYTES * (max_new + tokens - context) * shape.layers * shape.q_heads,
    }
    if tokens + max_new > positions:
        out["feasible"] = False
        out["warnings"].append(
            f"Prompt and output are {tokens + max_new:,} tokens, the model takes {positions:,}: shorten the prompt."
        )
    if limit is not None and floor > limit:
        about = "needs" if chosen.floor_is_exact else "needs, by estimate,"
        end = (
            "the run would be refused."
            if chosen.floor_is_exact
            else ("the run may be refused once its spans are known.")
        )
        out["warnings"].append(
            f"{chosen.title} {about} {floor / full:.1%} of full KV for this prompt; the budget is "
            f"{limit / full:.1%}: {end}"
        )
    return out


@lru_cache(maxsize=8)
def _shape(source: str) -> tuple[KVShape, int]:
    """KV sizes and positions by config.json, for float32 storage (what a CPU run uses by default)."""
    config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    q_heads = text.get("num_attention_heads") or text.get("n_head")
    layers = text.get("num_hidden_layers") or text.get("n_layer")
    hidden = text.get("hidden_size") or text.get("n_embd")
    if not (q_heads and layers and hidden):
        raise UnsupportedModel(f"'{source}' has a config.json without layers, heads and hidden size.")
    head_dim = text.get("head_dim") or hidden // q_heads
    shape = KVShape(layers, q_heads, text.get("num_key_value_heads") or q_heads, head_dim, 4)
    return shape, int(text.get("max_position_embeddings") or text.get("n_positions") or 1 << 30)
