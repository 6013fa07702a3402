"""The second reading: the prompt goes through the model once more, chunk by chunk, each chunk behind an instruction to
repeat it, over the full cache. What repeats it is thrown away; the most attention that each prompt token received
stays.

Its time is part of the prefill, its keys and values count on the device while they are there.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

from kvlens.engine.border import scored
from kvlens.engine.hf_attention import SessionCache, forms_of
from kvlens.engine.models import LoadedModel
from kvlens.engine.options import Progress
from kvlens.engine.prefill import Reader, ReadPrompt
from kvlens.engine.session import Session
from kvlens.kernels.attend import LayerForm, causal, form_at, grouped_scores, prefill_attention
from kvlens.methods.hooks import SecondReading
from kvlens.records import TraceSink
from kvlens.refusal import Refusal
from kvlens.text.prompts import Prompt

BLOCK = 256
"""queries whose attention weights are in memory at once"""


class Reading(Protocol):
    """A run whose prompt has been read once (kvlens.engine.loop.Generation)."""

    loaded: LoadedModel
    prompt: Prompt
    session: Session
    sink: TraceSink | None
    """None: the run is not recorded"""
    progress: Progress

    def check(self) -> None:
        """Raise where the run is to stop."""


def read_again(run: Reading, read: ReadPrompt | Reader | None) -> tuple[int, float]:
    """Read a run's prompt again as its method needs and hand its session what was received; return the tokens that went
    through the model for it, and the seconds it took. read: the first reading; where it is one of several runs, it
    keeps what was received for those that are not recorded. Raises Refusal (`no_second_reading`) for a model that ends
    before the repetition does."""
    loaded, prompt, session = run.loaded, run.prompt, run.session
    stored_repeats = read.repeats if isinstance(read, ReadPrompt) else {}
    second, store, start_time = session.needs.second, session.prompt, time.perf_counter()
    assert second is not None
    assert store is not None
    if run.sink is None and second in stored_repeats:
        session.observed.repeated(*stored_repeats[second])
        return 0, 0.0
    repeats = _Repeats(loaded, store.keys, store.values, second)
    session.account.hold("second reading", repeats.most)
    end = "" if prompt.form is None else prompt.form.after
    n, tokens = store.keys.shape[2], 0
    most = getattr(loaded.model.config, "max_position_embeddings", None)
    for start in range(0, n, second.chunk):
        run.check()
        chunk = prompt.ids[start : min(start + second.chunk, n)]
        ids = (*_instruction(loaded, second, prompt, start, end), *chunk)
        if most is not None and n + len(ids) > most:
            raise Refusal(
                f"{session.method.name} reads the prompt twice, which takes {n + len(ids):,} positions, and the model "
                f"has {most:,}: shorten the prompt or the chunk.",
                code="no_second_reading",
                positions=n + len(ids),
                most=most,
            )
        repeats.begin(start, start + len(chunk))
        fed = torch.tensor([ids], device=store.keys.device)
        cache = SessionCache(repeats, loaded.shape.layers)
        loaded.model.base_model(input_ids=fed, past_key_values=cache, use_cache=True)
        watched = (queries for parts in repeats.watched for queries in parts)
        session.account.hold("second reading", repeats.most, *repeats.keys, *repeats.values, *watched)
        tokens += len(ids)
        run.progress("prefill", start + len(chunk), n)
    session.account.release("second reading")
    stored_repeats[second] = repeats.most, repeats.queries()
    session.observed.repeated(*stored_repeats[second])
    return tokens, time.perf_counter() - start_time


def _instruction(loaded: LoadedModel, second: SecondReading, prompt: Prompt, start: int, end: str) -> tuple[int, ...]:
    """Return the ids before the chunk at `start`; end: of a user's turn."""

    def encode(text: str) -> list[int]:
        ids: list[int] = loaded.tokenizer.encode(text, add_special_tokens=False) if text else []
        return ids

    asks = encode(second.following if start else second.opening)
    return (*asks, *prompt.ids[max(start - second.lead, 0) : start], *encode(end))


class _Repeats:
    """A session of full KV after the prompt (kvlens.engine.hf_attention.LayerSession) that owns the keys and values of
    the chunk that is repeated."""

    def __init__(self, loaded: LoadedModel, keys: torch.Tensor, values: torch.Tensor, second: SecondReading) -> None:
        """keys, values: the prompt's [L, H_kv, n, D]."""
        self._prompt, self._forms = (keys, values), forms_of(loaded.model, loaded.shape)
        self._sinks, self._wanted, self._start, self._end = second.sinks, second.queries, 0, 0
        self.watched: list[list[torch.Tensor]] = [[] for _ in range(len(keys))]
        """by layer: queries [Hq, w, D] of each chunk so far"""
        self.most = torch.zeros(len(keys), loaded.shape.q_heads, keys.shape[2], device=keys.device)
        """float32 [L, Hq, n]: the most attention each token received so far"""
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def begin(self, start: int, end: int) -> None:
        """Forget the chunk before and repeat positions [start, end)."""
        self._start, self._end = start, end
        self.keys, self.values = [], []

    def queries(self) -> torch.Tensor | None:
        """Return the queries [L, Hq, w, D] that the method asked for; None: it asked for none."""
        return torch.stack([torch.cat(parts, 1) for parts in self.watched]) if self._wanted else None

    # ---- called by the seam
    def form(self, layer: int) -> LayerForm:
        return form_at(self._forms, layer)

    def tokens_seen(self, layer: int) -> int:
        fed = self.keys[layer].shape[1] if layer < len(self.keys) else 0
        return int(self._prompt[0].shape[2]) + fed

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        assert layer == len(self.keys), "a chunk goes through the model in one piece"
        self.keys.append(keys)
        self.values.append(values)

    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        keys, values = (
            torch.cat([states[layer], new], 1)[None]
            for states, new in zip(self._prompt, (self.keys[layer], self.values[layer]), strict=True)
        )
        form = self.form(layer)
        if self._wanted:
            share = self._wanted * (self._end - self._start) / self._prompt[0].shape[2]
            count = min(self._end - self._start, max(1, round(share)))
            rows = torch.linspace(self._start - self._end, -1, count, device=q.device).round().long()
            self.watched[layer].append(scored(q[0, :, rows + q.shape[2]], scaling))
        if not form.window:
            self._receive(layer, q[0], scaling, form)
        return prefill_attention(q, keys, values, scaling, form)

    def _receive(self, layer: int, q: torch.Tensor, scaling: float, form: LayerForm) -> None:
        """Take the attention of q [Hq, m, D] over the sinks, the chunk and what repeats it."""
        start, end, m = self._start, self._end, q.shape[1]
        sinks = min(self._sinks, start)
        prompt = self._prompt[0][layer]
        keys = torch.cat([prompt[:, :sinks], prompt[:, start:end], self.keys[layer]], 1).float()
        visible = causal(m, keys.shape[1], 0, q.device)
        best = self.most[layer, :, start:end].unflatten(0, (len(keys), -1))
        for start_row in range(0, m, BLOCK):
            queries = q[:, start_row : start_row + BLOCK].unflatten(0, (len(keys), -1)).float()
            scores = form.cap(grouped_scores(queries, keys) * scaling)
            weights = form.weigh(scores.masked_fill(~visible[start_row : start_row + BLOCK], -torch.inf))
            torch.maximum(best, weights[..., sinks : sinks + end - start].amax(2), out=best)
