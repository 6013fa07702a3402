"""Presses of kvpress under `kvlens.observe` beside kvlens's own runs: the same prompt, model and budget.

`benchmarks/observe_presses.py` calls `compare_own` in the oracle's environment. kvlens runs its method and keeps which
positions each KV head attended in every step. Then kvpress's press does the same work, observed: the prompt without
its last token is read under the press, the last token and the chosen ones follow one at a time. Positions, tokens,
answers and masses are laid side by side. Where the press counts the whole prompt (SnapKV as published), kvpress's step
0 attends the whole prompt and kvlens's attends what stayed: these are compared from step 1 on.
"""

from __future__ import annotations

import tempfile
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import kvpress
import torch
from transformers import DynamicCache

import kvlens
from kvlens.observing.hooking import press_name
from kvlens.recording import recorder
from kvlens.text.prompts import PromptText
from kvlens.tiers.slots import FREE

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pandas as pd

    from kvlens.recording.snapshot import Attended, Snapshot

WINDOW, KERNEL, SINKS = 8, 5, 4
SHARE = 4
"""of so many prompt tokens one is kept"""
CLOSE = 2e-4
"""largest difference of masses that float32 in another order may make over all layers"""
OWN_ATTENTION = "kvlens"


@dataclass(frozen=True)
class Pair:
    """A method of kvlens and the press that says the same."""

    method: str
    params: dict[str, Any]
    place: str
    """the parameter's count of places beyond the kept prompt tokens: "kept", or "bag", which has one for the newest"""
    prefill: Any
    """ratio -> the press under which the prompt is read"""
    decode: Any = None
    """kept tokens -> the press under which tokens are decoded; None: none"""
    whole: bool = False
    """the press counts the prompt's last token"""
    only: int | None = None
    """compared are the first so many steps; None: all"""
    why: str = ""


class OrderedStreaming(kvpress.StreamingLLMPress):
    """StreamingLLM whose cut keeps the cache in order, so that the next cut finds the oldest token."""

    def compress(
        self, module: Any, hidden_states: Any, keys: torch.Tensor, values: torch.Tensor, attentions: Any, kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [B, H_kv, kept, D] in the order that they had."""
        count = keys.shape[2] - int(keys.shape[2] * (1 - self.compression_ratio))
        stays = torch.ones(keys.shape[2], dtype=torch.bool)
        stays[self.n_sink : self.n_sink + count] = False
        return keys[:, :, stays], values[:, :, stays]


def _snap(ratio: float) -> Any:
    return kvpress.SnapKVPress(ratio, window_size=WINDOW, kernel_size=KERNEL)


SNAP = {"window": WINDOW, "kernel": KERNEL, "pool": "avg"}
PAIRS = (
    Pair("snapkv", {**SNAP, "peek": False}, "kept", _snap),
    Pair(
        "snapkv",
        SNAP,
        "kept",
        _snap,
        whole=True,
        why="as published: the press counts the prompt's last token, whose step attends the whole prompt under kvpress "
        "and what stayed under kvlens",
    ),
    Pair("keydiff", {}, "kept", kvpress.KeyDiffPress),
    Pair(
        "tova",
        {"recent": 2},
        "bag",
        kvpress.TOVAPress,
        lambda kept_count: kvpress.DecodingPress(kvpress.TOVAPress(), 1, kept_count, hidden_states_buffer_size=1),
    ),
    Pair(
        "streaming_llm",
        {"sinks": SINKS, "positions": "true"},
        "bag",
        lambda ratio: kvpress.StreamingLLMPress(ratio, SINKS),
        only=1,
        why="kvpress's press cuts the prompt alone, the method every step: the first step is compared",
    ),
    Pair(
        "streaming_llm",
        {"sinks": SINKS, "positions": "true"},
        "bag",
        lambda ratio: OrderedStreaming(ratio, SINKS),
        lambda kept_count: kvpress.DecodingPress(OrderedStreaming(0.0, SINKS), 1, kept_count),
        why="kvpress's cut leaves the cache without order, so that its decoding press finds no oldest token: here the "
        "press cuts the same tokens and keeps the order",
    ),
)


@contextmanager
def noting(rows: dict[tuple[str, int], torch.Tensor]) -> Iterator[None]:
    """Inside, `rows` takes what every recorded step of a method attended: (method, step) -> bool [L, H_kv, n]."""
    original = recorder.Recorder._measure

    def measure(self: Any, batch: list[Any]) -> None:
        for settled in batch:
            shot = settled.seen.shot
            masks = [attended_positions(group, shot) for group in shot.groups]
            rows.setdefault((self.method.name, settled.seen.facts.step), torch.cat(masks))  # repeats come later
        original(self, batch)

    with patch.object(recorder.Recorder, "_measure", measure):
        yield


def attended_positions(group: Attended, shot: Snapshot) -> torch.Tensor:
    """Return which positions some layers attended: bool [l, H_kv, n]."""
    assert shot.shadow is not None
    count = shot.shadow.shape[2]
    position = torch.where(group.role == FREE, count, group.position.long()).clamp(0, count)
    mask = torch.zeros(*position.shape[:2], count + 1, dtype=torch.bool)
    return mask.scatter_(2, position, True)[:, :, :count]


def decode(model: Any, press: Any, pair: Pair, ids: torch.Tensor, kept_count: int, steps: int) -> list[int]:
    """Generate under kvpress one token at a time -> the tokens."""
    cache, tokens = DynamicCache(), list[int]()
    position = ids.shape[1] - (not pair.whole)
    with torch.no_grad():
        with press(model):
            hidden = model.model(ids[:, :position], past_key_values=cache).last_hidden_state
        fed = model.lm_head(hidden[:, -1:]).argmax(-1) if pair.whole else ids[:, position:]
        tokens += [int(fed)] * pair.whole
        decoding = nullcontext() if pair.decode is None else pair.decode(kept_count)(model)
        with decoding:
            while len(tokens) < steps:
                logits = model(fed, past_key_values=cache, position_ids=torch.tensor([[position]])).logits
                position, fed = position + 1, logits[:, -1:].argmax(-1)
                tokens.append(int(fed))
    return tokens


def compare_pair(pair: Pair, model: Any, tokenizer: Any, prompt: PromptText, steps: int, runs: Path) -> dict[str, Any]:
    """Run one pair and lay the two stored runs side by side."""
    kept_count = len(tokenizer(prompt.text)["input_ids"]) // SHARE
    positions: dict[tuple[str, int], torch.Tensor] = {}
    model.set_attn_implementation(OWN_ATTENTION)
    settings: dict[str, Any] = {"max_new": steps, "chat": "off", "ignore_eos": True, "runs": runs, "progress": False}
    with noting(positions):
        own_run = kvlens.run(
            prompt,
            pair.method,
            1.0,
            model=model,
            tokenizer=tokenizer,
            **settings,
            tokens=kept_count + (pair.place == "bag"),
            **pair.params,
        )
    stored = own_run.reader.tokens()
    ids = torch.tensor([stored[stored["step"].isna()].sort_values("pos")["token_id"].tolist()])
    length = ids.shape[1]
    model.set_attn_implementation("sdpa")
    ranked = length - (not pair.whole)
    press = pair.prefill(1 - (kept_count + 0.5) / ranked)
    with kvlens.observe(model, tokenizer, answer=prompt.answer, runs=runs, progress=False) as watch:
        tokens = decode(model, press, pair, ids, kept_count, steps)
    observed = watch.run
    asked_steps = 0 if pair.whole else 1
    first_step, prompt_tokens = int(pair.whole), observed.meta.prompt_tokens
    steps_taken = watch._watch.observer.steps[asked_steps:]
    steps_taken = steps_taken[: pair.only]
    theirs = torch.stack([step.present for step in steps_taken[first_step:]])
    ours = torch.stack(
        [positions[pair.method, step][:, :, :prompt_tokens] for step in range(first_step, len(steps_taken))]
    )
    ends = first_step, len(steps_taken)
    shifts = (own_run, 0), (observed, asked_steps)
    heads = [_between(run.head_steps(), *(end + shift for end in ends)) for run, shift in shifts]
    columns = ("coverage", "entropy_nats")
    differences = {name: float(abs(heads[0][name].to_numpy() - heads[1][name].to_numpy()).max()) for name in columns}
    return {
        "method": pair.method,
        "params": {**pair.params, "tokens": kept_count + (pair.place == "bag")},
        "press": press_name(press),
        "decoding": None if pair.decode is None else press_name(pair.decode(kept_count)),
        "counts_whole_prompt": pair.whole,
        "prompt_tokens": length,
        "kept_tokens": kept_count,
        "steps": len(theirs),
        "sets": ours.shape[0] * ours.shape[1] * ours.shape[2],
        "sets_equal": int((ours == theirs).all(-1).sum()),
        "tokens_equal": own_run.steps()["token_id"].tolist()[: pair.only] == tokens[: pair.only],
        "own_output": own_run.output,
        "observed_output": observed.output,
        "own_outcome": own_run.verdict.outcome,
        "observed_outcome": observed.verdict.outcome,
        "note": pair.why,
        **{f"{name}_differs_at_most": float(f"{value:.2g}") for name, value in differences.items()},
    }


def _between(rows: pd.DataFrame, start: int, end: int) -> pd.DataFrame:
    return rows[(rows["step"] >= start) & (rows["step"] < end)]


def agrees(row: dict[str, Any]) -> bool:
    """Return True if both attended the same positions in every compared step and, where the same tokens attend them,
    chose the same tokens by the same masses."""
    if row["sets_equal"] != row["sets"]:
        return False
    return bool(row["counts_whole_prompt"] or (row["tokens_equal"] and row["coverage_differs_at_most"] <= CLOSE))


def compare_own(name: str, model: Any, tokenizer: Any, prompt: PromptText, steps: int) -> list[dict[str, Any]]:
    """Return a row per pair. name: what the rows call the model."""
    attention = model.config._attn_implementation
    with tempfile.TemporaryDirectory() as folder:
        try:
            return [
                {"model": name} | compare_pair(pair, model, tokenizer, prompt, steps, Path(folder)) for pair in PAIRS
            ]
        finally:
            model.set_attn_implementation(attention)
