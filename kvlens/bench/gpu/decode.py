"""Part 4: whole decode steps. The Hugging Face modules with random weights, one sequence, through kvlens/static: the same step, method
code and recall as in a run, captured in a CUDA graph. Decisions that depend on meaning are replayed (replayed.py).

Two times are taken: the graph launched again and again, and the decode loop as it is, with what the host does between two steps.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kvlens.bench.gpu.ceilings import COPY, TO_DEVICE
from kvlens.bench.gpu.device import p95
from kvlens.bench.gpu.failures import sentence
from kvlens.bench.gpu.floors import DECODE_METHODS, Rates, decode_shape, traffic
from kvlens.bench.gpu.model import random_model, random_prompt
from kvlens.bench.gpu.part import Bench, Part
from kvlens.bench.gpu.result import Scope, StepRow, ceiling

LABEL = "whole decode steps of the Hugging Face modules, one sequence, random weights, random keys and values, replayed decisions"
SMALLER = "leave the longest context out: --contexts 8192,32768"
WARM, LOOP, SPARE = 6, 32, 4 << 30
"""steps before anything is timed; steps of the loop that is timed; bytes left for what a step computes"""
FILES = (
    "calls.py", "ceilings.py", "decode.py", "failures.py", "model.py", "offloaded.py", "replay.py", "replayed.py", "settings.py",
)  # fmt: skip


@dataclass
class Decoding:
    """A decoder in the midst of a generation, and the replay that answers for its method."""

    decoder: Any
    replay: Any
    bench: Bench
    token: int = 1

    def steps(self, count: int) -> list[float]:
        """Seconds of whole steps: the token fed, what the method does between steps, the step, the likeliest token read by the host."""
        found = []
        for _ in range(count):
            begun = time.perf_counter()
            logits = self.decoder.step(self.token)
            self.token = int(logits.argmax())
            found.append(time.perf_counter() - begun)
        return found

    def times(self, graph: bool, repeats: int) -> list[float]:
        """Seconds of steps launched one after the other. They start at the same position every time, so slots suffice."""
        if graph:
            self.decoder.capture()
        position = self.decoder.session.position
        at = position.clone()
        for _ in range(1 if self.bench.dry else WARM):
            self.decoder.launch()
        position.copy_(at)
        found = self.bench.device.times(self._recorded, repeats)
        position.copy_(at)
        return found

    def _recorded(self) -> None:
        """A launch, and the reading of a ring that is full."""
        self.decoder.launch()
        self.decoder.session.stepped()

    def close(self) -> None:
        self.decoder.close()


def begin(bench: Bench, method: str, context: int, rates: Rates, ring: int = 0, record: Any = "heads") -> Decoding:
    """A decoder whose memory holds `context` random tokens, with step 0 made. Called in inference mode."""
    from kvlens.bench.gpu.replayed import Replay, replayed
    from kvlens.bench.gpu.settings import setting
    from kvlens.engine import Options
    from kvlens.static import StaticDecoder

    loaded = bench.keep_alone("model", lambda: random_model(bench))
    shape = decode_shape(method, context, rates)
    # a launch that is timed reuses positions, so the slots of one round are enough
    max_new = WARM + LOOP + bench.repeats + WARM + 2
    chosen = setting(method, shape, bench.model.kv, context, max_new)
    replay = Replay(shape, rates, chosen.alike, chosen.blocking)
    prompt, read = random_prompt(bench, context)
    decoder = StaticDecoder(
        loaded, prompt, replayed(chosen.method, replay), chosen.params, chosen.budget, Options(max_new=max_new, ignore_eos=True), ring,
        read=read, record=record, host=partial(host_memory, bench), kernels=chosen.kernels,
    )  # fmt: skip
    session = decoder.session
    session.memory.is_hot[:, :, replay.cold] = False
    _fill_factors(decoder)
    del read
    made = Decoding(decoder, replay, bench, prompt.ids[-1])
    made.steps(1)
    return made


def host_memory(bench: Bench, layers: int, size: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Host memory for the cold tier: parts of the one pool that was pinned, which layers share where it is too small for all."""
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
    factors, memory = decoder.session.rows.factors, decoder.session.memory
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
    if end > min(len(pool) for pool in factors.flat):
        raise MemoryError
    for at in range(len(factors.flat)):
        factors.fill(at, named)
    factors.publish()


@torch.inference_mode()
def cell(bench: Bench, method: str, context: int, rates: Rates, scope: Scope = "decode") -> StepRow:
    """One method at one context. Memory that cannot suffice is said before it is asked for."""
    bytes_moved = traffic(decode_shape(method, context, rates), bench.model, 1)
    copy, link = ceiling(bench.result, COPY), ceiling(bench.result, TO_DEVICE)
    floor = bytes_moved.floor(copy, link) if copy and link else None
    row = partial(
        StepRow, method, context, 1, floor=floor, device_bytes=bytes_moved.device_bytes, host_bytes=bytes_moved.host_bytes,
        rates=dataclasses.asdict(rates), scope=scope, transfer=None, selection=None,
    )  # fmt: skip
    unmeasured = partial(
        row, graph=False, steps=0, median=None, p95=None, over_floor=None, stall=None, peak_bytes=None, note="",
        resident_bytes=bytes_moved.resident,
    )  # fmt: skip
    try:
        bench.keep_alone("model", lambda: random_model(bench))
        # the prompt is whole on the device until the method has placed it, whatever is kept then
        needed, free = bench.model.kv.full_kv_bytes(context) + bytes_moved.resident + SPARE, bench.device.free_bytes()
        if needed > free:
            return unmeasured(reason=f"does not fit: needs {needed / 1e9:.1f} GB beside the weights, {free / 1e9:.1f} GB free; {SMALLER}")
        if method == "hf_offloaded":
            from kvlens.bench.gpu.offloaded import timed

            found = timed(bench, context)
        else:
            found = _timed(bench, method, context, rates, scope)
        return row(**found, over_floor=found["median"] / floor if floor else None)
    except Exception as problem:
        if not bench.device.alive():
            raise
        reason, suggestion = sentence(problem, SMALLER)
        return unmeasured(reason=reason + (f"; {suggestion}" if suggestion else ""))
    finally:
        bench.device.release()


def _timed(bench: Bench, method: str, context: int, rates: Rates, scope: Scope) -> dict[str, Any]:
    device, graph = bench.device, not bench.dry
    made = begin(bench, method, context, rates)
    try:
        device.release()
        device.reset_peak()
        backend = "eager" if bench.dry else "inductor"
        if scope == "compiled":
            made.decoder.compiled(backend)
        elif scope == "fused":
            made.decoder.fused(backend)
        made.steps(1 if bench.dry else WARM)
        times = made.times(graph, bench.repeats)
        before, loops = made.decoder.moved_bytes().sum(), 2 if bench.dry else LOOP
        loop = made.steps(loops)
        counted = int(made.decoder.moved_bytes().sum() - before) // loops
        peak, stall, median = device.peak_bytes(), None, statistics.median(times)
        if made.replay.cold and scope != "compiled":
            made.replay.moves = False
            stall = median - statistics.median(made.times(graph, bench.repeats))
        session = made.decoder.session
        note = "no graph: a dry run" if not graph else ""
        return {
            "graph": graph, "steps": len(times), "median": median, "p95": p95(times), "stall": stall, "peak_bytes": peak, "note": note,
            "resident_bytes": session.memory.account.resident + session.bytes, "loop": statistics.median(loop), "counted_bytes": counted,
            "kernels": session.kernels,
        }  # fmt: skip
    finally:
        made.close()


def decodes(context: int) -> Part:
    """All methods at one context."""

    def measure(bench: Bench) -> list[StepRow]:
        return [cell(bench, method, context, bench.rates) for method in DECODE_METHODS]

    return Part(f"decode {context}", measure, FILES, SMALLER)


def sweep(context: int) -> Part:
    """FreeKV and blocking recall over the rates that no random weights can give."""

    def measure(bench: Bench) -> list[StepRow]:
        found = []
        for miss in (0.1, 0.3, 1.0):
            found.append(cell(bench, "blocking", context, Rates(miss=miss)))
            found += [cell(bench, "freekv", context, Rates(miss=miss, correction=rate)) for rate in (0.0, 0.14, 0.5)]
        return found

    return Part(f"decode sweep {context}", measure, FILES, SMALLER)


def fused(context: int) -> Part:
    """The methods that recall, with their plan and tables compiled by inductor, once for all layers, before the step is captured."""

    def measure(bench: Bench) -> list[StepRow]:
        return [cell(bench, method, context, bench.rates, "fused") for method in ("freekv", "blocking", "sekv", "sentkv")]

    return Part(f"fused {context}", measure, FILES, SMALLER)


def compiled(context: int) -> Part:
    """FullKV and FreeKV with the step compiled whole before it is captured. Compiling takes minutes, so it comes last."""

    def measure(bench: Bench) -> list[StepRow]:
        return [cell(bench, method, context, bench.rates, "compiled") for method in ("full", "freekv")]

    return Part(f"compiled {context}", measure, FILES, SMALLER)
