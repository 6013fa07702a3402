"""Follows a model through a block of a caller's code: the passes of the generation, its steps, what each attended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from kvlens.observing.calls import Call
from kvlens.observing.changes import Changes
from kvlens.observing.frames import FrameMaker, count_kinds, present, rewritten_errors
from kvlens.observing.fullkv import RANKED, TOP_SPANS, WaitingSteps
from kvlens.observing.holdings import count_bytes, layer_bytes
from kvlens.observing.layers import LayerWatch
from kvlens.observing.matching import Matcher, Turn
from kvlens.observing.pages import Pages
from kvlens.observing.refusals import count_padding, refuse_row
from kvlens.observing.taken import Pass, Taken, blank, chose_greedily, count_fed, count_length, follow_pages
from kvlens.observing.written import Shadow, Written
from kvlens.recording.measure import measure
from kvlens.recording.sampling import OracleSampling
from kvlens.shape import KVShape

MOST_ROWS = 128
"""tokens of one pass behind the prompt that are followed as steps"""


class Observer:
    """Watches one sequence. Owns the tokens, the shadow copies and the steps taken."""

    def __init__(
        self,
        shape: KVShape,
        row: int,
        shadow: bool,
        turn: Callable[[int], Turn | None],
        windowed: frozenset[int],
        sampling: Callable[[int], OracleSampling | None],
        changes: Callable[[int, int, Written], Changes | None],
        device: torch.device,
    ) -> None:
        """turn(layer): takes rotation back; windowed: layers with a sliding window; sampling(prompt tokens): steps of
        full attention; changes(layer, prompt tokens, written): a counterfactual's."""
        self.shape, self.row, self.device = shape, row, device
        self._turn, self.windowed, self._sampling, self._changes = turn, windowed, sampling, changes
        self.zero_ns = 0
        """when the first pass began"""
        self.tokens: list[int] = []
        """of every position that was fed"""
        self.announced: int | None = None
        """prompt tokens of a call of `generate`"""
        self.pads: int | None = None
        self.prompt_tokens = self.prompt_passes = 0
        self.steps: list[Taken] = []
        self.cache_name, self.given_end = "", 0
        """positions below it were fed several at a time: their tokens were given, not chosen"""
        self.stopped: str | None = None
        """why later passes are not followed"""
        self.copies = Shadow(shape.layers) if shadow else None
        self.written = [Written(self.copies, layer, shape.kv_heads) for layer in range(shape.layers)]
        self.pages: Pages | None = None
        self.oracle: OracleSampling | None = None
        self.waiting_steps = WaitingSteps()
        self._cached: torch.Tensor | None = None
        self._layers: list[LayerWatch] = []
        self._maker: FrameMaker | None = None
        self._pass: Pass | None = None
        self._length = 0
        self._waiting: list[Taken] = []
        """steps of the last pass, whose logits and last token are not known yet"""

    def begin(
        self, ids: torch.Tensor | None, mask: torch.Tensor | None, cache: Any, dropped: frozenset[int] = frozenset()
    ) -> None:
        """The decoder begins a pass over ids [B, m]. mask [B, n]: 0 where a token is padding; dropped: tokens that a
        press takes out of the embeddings."""
        began = time.perf_counter_ns()
        if self.stopped or ids is None:
            if not self.tokens:
                self._stop("the prompt was fed as embeddings instead of tokens")
            return  # a press looks at the cache by embeddings of its own; keys that it leaves match no token
        if self.row >= len(ids):
            raise refuse_row(self.row, len(ids))
        length = count_length(cache)
        if self.steps and length < self._length:
            self._stop("the cache was cut back or exchanged: what follows is another generation")
            return
        row, start = [token for token in ids[self.row].tolist() if token not in dropped], len(self.tokens)
        if self.pads is None:
            self.pads = 0 if mask is None or mask.shape[1] != len(row) else count_padding(mask, self.row)
        pads = 0 if start else self.pads
        if not start:
            self.zero_ns = began
            self.prompt_tokens = (self.announced or len(row)) - pads
            self._ready()
        new = row[pads:]
        self.prompt_passes += start < self.prompt_tokens
        first = max(0, self.prompt_tokens - 1 - start)
        rows = torch.arange(min(pads + first, len(row)), len(row), device=self.device)
        rows = rows[:0] if start >= self.prompt_tokens and len(new) > MOST_ROWS else rows
        held = count_bytes(cache, self.shape.layers, self.device, len(ids))[0]
        self._pass = Pass(start, rows, start + first, began, length, cache, len(new) > 1, len(ids), held)
        self.tokens += new
        self._pass.spent_ns = time.perf_counter_ns() - began

    def _ready(self) -> None:
        self.pages = Pages(self.prompt_tokens)
        self.oracle = self._sampling(self.prompt_tokens) if self.copies is not None else None
        for layer, written in enumerate(self.written):
            changes = self._changes(layer, self.prompt_tokens, written)
            self._layers.append(LayerWatch(Matcher(written, self._turn(layer)), changes))

    def end(self, cache: Any) -> None:
        """The decoder has ended its pass."""
        current, self._pass = self._pass, None
        if current is None or self.stopped:
            return
        began, fed = time.perf_counter_ns(), len(self.tokens) - current.start
        cache = current.cache if cache is None else cache
        if any(written.count != len(self.tokens) for written in self.written):
            self._stop("some layers wrote no keys of some tokens")
            return
        self._length = count_length(cache)
        probe = current.start >= self.prompt_tokens and current.multiple and self._length == current.length_before
        if probe or (len(current.rows) == 0 and current.start >= self.prompt_tokens):
            if not probe:
                self._stop(f"a pass of {fed} tokens followed the prompt; at most {MOST_ROWS} are followed as steps")
            self._forget(current.start)
            return
        if not self.cache_name and cache is not None:
            self.cache_name = type(cache).__name__
        self._settle(self.tokens[current.start])
        if current.multiple and current.start == max(self.given_end, self.prompt_tokens):
            self.given_end = len(self.tokens)
        if len(current.rows):
            self._take(current, cache, began)

    def _forget(self, start: int) -> None:
        """Drop a pass that left nothing in the cache: a press looked at the prompt once more."""
        del self.tokens[start:]
        for written in self.written:
            written.cut(start)

    def _take(self, current: Pass, cache: Any, began: int) -> None:
        """Make the steps of a pass."""
        assert self.pages is not None
        if self._maker is None:
            self._maker = FrameMaker(self.shape, self.pages)
        layers = [current.seen[layer] for layer in range(self.shape.layers)]
        held, elsewhere = count_bytes(cache, self.shape.layers, self.device, current.batch)
        shadow = None if self.copies is None else self.copies.keys(len(self.tokens))
        took = (began - current.began_ns - current.spent_ns) // 1000 // len(current.rows)
        for at in range(len(current.rows)):
            number = current.first_row + at - (self.prompt_tokens - 1)
            sampled = () if self.oracle is None else tuple(set(self.oracle.choose_layers(number)) - self.windowed)
            shot = self._maker.frame(layers, at, current.first_row + at, shadow, tuple(sorted(sampled)))
            taken = Taken(
                current.first_row + at,
                measure([shot], TOP_SPANS, RANKED)[0],
                present(layers, at, self.prompt_tokens),
                rewritten_errors(layers, at, self.prompt_tokens),
                count_kinds(layers, at),
                (current.began_ns - self.zero_ns) // 1000 + at * took,
                took,
                held=held,
                peak=current.peak(held),
                elsewhere=elsewhere,
                errors=max(layer.output_error for layer in layers),
            )
            self.waiting_steps.keep(number, shot)
            blank(taken.measured, self.windowed, any(written.unsized for written in self.written))
            follow_pages(self.pages, [*self.steps, *self._waiting], taken, number)
            if at + 1 < len(current.rows):
                taken.token = self.tokens[current.first_row + at + 1]
            self._waiting.append(taken)
        self._waiting[-1].record_us = (time.perf_counter_ns() - began + current.spent_ns) // 1000

    def _settle(self, token: int) -> None:
        """The token that the last pass chose is known."""
        if self._waiting:
            self._waiting[-1].token = token
            self.steps, self._waiting = [*self.steps, *self._waiting], []

    def _stop(self, why: str) -> None:
        if self.stopped is None:
            self.stopped = why
            self._forget(min(len(self.tokens), count_fed([*self.steps, *self._waiting])))

    def logits(self, logits: torch.Tensor) -> None:
        """The model made logits [B, k, V] of the last k tokens of the pass that ended."""
        if self.stopped or not self._waiting:
            return
        rows = logits[self.row].detach().float()
        for taken, row in zip(reversed(self._waiting), reversed(rows.unbind(0)), strict=False):
            taken.logits = row.cpu().clone()

    def finish(self, chosen: list[int] | None) -> None:
        """The block has ended. chosen: every token of the chosen sequence, as `generate` returned it."""
        if not self._waiting:
            return
        last = self._waiting[-1]
        if chosen is not None and len(chosen) > last.position + 1:
            self._settle(chosen[last.position + 1])
        elif last.logits is not None and chose_greedily(self.steps, self.given_end):
            self._settle(int(last.logits.argmax()))
        else:
            self.steps, self._waiting = [*self.steps, *self._waiting[:-1]], []

    def written_keys(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See kvlens.observing.calls.Watcher."""
        current = self._pass
        if current is None or self.stopped or not 0 <= layer < self.shape.layers:
            return
        fed = len(self.tokens) - current.start
        if self.written[layer].count == len(self.tokens):
            return  # a press reads the prompt once more inside the pass
        began = time.perf_counter_ns()
        self.written[layer].append(keys[self.row][:, -fed:], values[self.row][:, -fed:])
        current.spent_ns += time.perf_counter_ns() - began

    def cached_keys(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """See kvlens.observing.calls.Watcher."""
        if self._pass is None or self.stopped or not 0 <= layer < self.shape.layers:
            return
        self._cached = torch.cat([keys, values], -1) if self.written[layer].latent else None

    def _steps_of(self, call: Call) -> Pass | None:
        """Return the pass of a call whose rows are steps; None: the call is not followed."""
        current = None if self.stopped else self._pass
        return current if current is not None and current.follows(call.layer) else None

    def attends(self, call: Call) -> Call:
        """See kvlens.observing.calls.Watcher."""
        if (current := self._steps_of(call)) is None:
            return call
        began, step = time.perf_counter_ns(), current.first_row - (self.prompt_tokens - 1)
        call = self._layers[call.layer].prepare(call, self.row, current.rows, step, self._cached)
        current.spent_ns += time.perf_counter_ns() - began
        return call

    def attended(self, call: Call, output: torch.Tensor) -> None:
        """See kvlens.observing.calls.Watcher."""
        if (current := self._steps_of(call)) is None:
            return
        began = time.perf_counter_ns()
        current.seen[call.layer] = self._layers[call.layer].finish(call, self.row, output)
        current.now[call.layer] = layer_bytes(current.cache, call.layer, self.device, current.batch)
        current.spent_ns += time.perf_counter_ns() - began
