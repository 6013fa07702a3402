"""Decoders whose memory was filled with random keys and values, one sequence or several in one step, ready to be
timed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvlens.lab.gpu.model import random_model, random_prompt
from kvlens.lab.gpu.part import Bench
from kvlens.lab.gpu.settings import Rates, Setting
from kvlens.lab.results.gpu import Way

HOST_LED: Way = "fused, recalls led by the host"
WARM, LOOP = 6, 32
"""steps before anything is timed; steps of the loop that is timed"""


@dataclass
class Decoding:
    """A decoder in the midst of its generations, and the replays that answer for its methods: one for each sequence,
    none where the method decides itself."""

    decoder: Any
    """StaticDecoder, or BatchDecoder for several sequences"""
    sessions: list[Any]
    replays: list[Any]
    bench: Bench
    token: Any
    """fed next; a list for several sequences"""

    def steps(self, count: int) -> list[float]:
        """Seconds of whole steps: tokens fed, what the methods do between steps, the step, the likeliest tokens read by
        the host."""
        seconds = []
        for _ in range(count):
            start_time = time.perf_counter()
            self.token = self.decoder.step(self.token).argmax(-1).tolist()
            seconds.append(time.perf_counter() - start_time)
        return seconds

    def times(self, graph: bool, repeats: int) -> list[float]:
        """Seconds of steps launched one after the other. They start at the same positions every time, so slots
        suffice."""
        if graph:
            self.decoder.capture()
        positions = [(session.position, session.position.clone()) for session in self.sessions]
        for _ in range(1 if self.bench.dry else WARM):
            self.decoder.launch()
        _return(positions)
        seconds = self.bench.device.times(self._recorded, repeats)
        _return(positions)
        return seconds

    def _recorded(self) -> None:
        """A launch, and the reading of rings that are full."""
        self.decoder.launch()
        for session in self.sessions:
            session.stepped()

    def rest(self) -> None:
        """From now on nobody wishes for anything."""
        for replay in self.replays:
            replay.moves = False

    @property
    def recalls(self) -> bool:
        """Wishes are replayed, so that the step can be timed without them."""
        return any(replay.cold for replay in self.replays)

    @property
    def resident(self) -> int:
        """Device bytes for KV purposes."""
        return sum(session.memory.account.resident + session.bytes for session in self.sessions)

    def close(self) -> None:
        self.decoder.close()


def _return(positions: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for position, saved in positions:
        position.copy_(saved)


def begin(
    bench: Bench,
    setting: Setting,
    context: int,
    rates: Rates,
    ring: int = 0,
    record: Any = "heads",
    batch: int = 1,
    way: Way = "fused",
) -> Decoding:
    """A decoder of `batch` sequences whose memory holds `context` random tokens each, with step 0 made. Called in
    inference mode.

    Sequences are placed one after the other, so no more than one whole prompt lies on the device at a time; in host
    memory they share what `host_memory` gives.
    """
    from kvlens.lab.gpu.static import BatchDecoder
    from kvlens.lab.gpu.static.host_moves import copy_each_page

    decoders: list[Any] = []
    replays: list[Any] = []
    try:
        for _ in range(batch):
            decoder, replay = _place(bench, setting, context, rates, ring, record)
            decoders.append(decoder)
            replays += [] if replay is None else [replay]
            if batch > 1:
                bench.device.release()
        last = [decoder.prompt.ids[-1] for decoder in decoders]
        sessions = [decoder.session for decoder in decoders]
        joined = BatchDecoder(decoders) if batch > 1 else decoders[0]
        if way != "modules":
            joined.fused()
        if way == HOST_LED:
            for session in sessions:
                session.recall.move = copy_each_page
        decoding = Decoding(joined, sessions, replays, bench, last if batch > 1 else last[0])
        decoding.steps(1)
    except BaseException:
        for decoder in decoders:
            decoder.close()
        raise
    return decoding


def _place(bench: Bench, setting: Setting, context: int, rates: Rates, ring: int, record: Any) -> tuple[Any, Any]:
    """A decoder of one sequence that has made no step, and its replay where the setting has rates."""
    from kvlens import methods
    from kvlens.engine.options import Options
    from kvlens.lab.gpu.replayed import Replay, replayed
    from kvlens.lab.gpu.static import StaticDecoder

    loaded, kv = bench.keep_alone("model", lambda: random_model(bench)), bench.model.kv
    # a launch that is timed reuses positions, so the slots of one round are enough
    max_new = WARM + LOOP + bench.repeats + WARM + 2
    method, params, replay = methods.get(setting.method), setting.parameters(context), None
    if setting.rates:
        assert setting.shape is not None, "rates are replayed by what a step wants and misses"
        replay = Replay(setting.shape(kv, context, rates), setting.alike)
        method = replayed(method, replay)
    prompt, read = random_prompt(bench, context)
    budget = setting.size(params, kv, context, max_new, rates)
    options, host = Options(max_new=max_new, ignore_eos=True), partial(host_memory, bench)
    decoder = StaticDecoder(loaded, prompt, method, params, budget, options, ring, read=read, record=record, host=host)
    if replay is not None:
        decoder.session.memory.spans.is_hot[:, :, replay.cold] = False
        _fill_factors(decoder)
    return decoder, replay


def host_memory(bench: Bench, layers: int, size: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Host memory for the cold tier: parts of the one pool that was pinned, which layers share where it is too small
    for all. Every sequence is given the same parts."""
    flat = bench.pool.view(-1)
    if len(size) == 1:
        return [flat[: len(flat) - layer * 64] for layer in range(layers)]
    count = torch.Size(size).numel()
    if count > len(flat):
        raise MemoryError
    starts = [layer * count % (len(flat) - count + 1) // 64 * 64 for layer in range(layers)]
    return [flat[start : start + count].view(size) for start in starts]


def _fill_factors(decoder: Any) -> None:
    """Name random factors of full rank for every span that would have been packed."""
    factors, memory = decoder.session.recall.factors, decoder.session.memory
    if factors is None:
        return
    named = torch.zeros_like(factors.meta[0], device="cpu")
    end = 0
    for row in memory.spans.rows:
        if row.state != "coarse":
            continue
        for head in range(memory.shape.kv_heads):
            tokens = row.tok_end - row.tok_start
            rank = min(factors.rank, tokens)
            named[head, row.span] = torch.tensor((end, tokens, rank, rank))
            end += 2 * rank * (tokens + memory.shape.head_dim + 1)
    if end > min(len(pool) for pool in memory.host.cold.flat):
        raise MemoryError
    factors.meta.copy_(named)
