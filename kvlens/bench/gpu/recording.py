"""Part 6: what recording adds to a step, at the level of the attention path: off, a number per head, masses of all pages.

The masses come out of k1 as in a run. They are gathered in a ring on the device and copied to pinned memory every 16 steps behind the
step's back. Kvlens's recorder and store, which run on the host, are not in it (docs/benchmarks.md has them on a CPU).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

import torch

from kvlens.bench.gpu.attention_step import FILES, SMALLER, whole_step
from kvlens.bench.gpu.device import Step, p95
from kvlens.bench.gpu.floors import Rates, StepShape, step_shape
from kvlens.bench.gpu.part import Bench, Part
from kvlens.bench.gpu.paths import Short
from kvlens.bench.gpu.replay import Counter
from kvlens.bench.gpu.result import RecordingRow
from kvlens.kernels.page_attend import page_attention

Recording = Literal["off", "heads", "spans"]
RING = 16


class Recorded(Short):
    """k1 over a short table. 'heads': the entropy over pages of each query head; 'spans': the masses of all pages, mean over the group."""

    def __init__(self, bench: Bench, shape: StepShape, context: int, batch: int, recording: Recording) -> None:
        super().__init__(bench, shape, context, batch)
        kv, self.recording = self.kv, recording
        size = (batch, kv.q_heads) if recording == "heads" else (batch, kv.kv_heads, shape.pages)
        self.ring = torch.zeros(RING, kv.layers, *size, dtype=torch.float16, device=bench.device.at)
        self.host = bench.device.pinned(*self.ring.shape).view(torch.float16)
        self.counter = Counter.zero(RING, bench.device.at)

    def attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        scaling = self.kv.head_dim**-0.5
        found = page_attention(q, *self.layers[layer], self.pages, scaling, mass=self.recording != "off")
        if found.mass is not None:
            if self.recording == "heads":
                row = torch.special.entr(found.mass).sum(-1)
            else:
                row = found.mass.unflatten(1, (self.kv.kv_heads, -1)).mean(2)
            self.ring[:, layer].index_copy_(0, self.counter.value, row.half()[None])
        return found.output

    def end(self) -> None:
        if self.recording != "off":
            self.counter.advance()

    def flush(self) -> None:
        """The ring to the host, behind the next steps' back; a ring of twice the size would keep it whole in a run."""
        self.bench.device.aside(lambda: self.host.copy_(self.ring, non_blocking=True))


def measure(bench: Bench) -> list[RecordingRow]:
    context = bench.contexts[min(1, len(bench.contexts) - 1)]
    found: list[RecordingRow] = []
    kinds: Sequence[Recording] = ("off", "heads", "spans")
    for graph in (True, False):
        for recording in kinds:
            path = Recorded(bench, step_shape("streaming_llm", context, Rates()), context, 1, recording)
            times = bench.device.times(_running(bench, path, graph), bench.repeats)
            bench.device.join()
            median = statistics.median(times)
            off = next((row.median for row in found if row.graph == graph and row.recording == "off"), median)
            found.append(RecordingRow(recording, graph, context, 1, median, p95(times), median / off - 1))
            bench.device.release()
    return found


def _running(bench: Bench, path: Recorded, graph: bool) -> Step:
    """The step, and a flush after every 16th."""
    step = whole_step(bench, path)
    run = bench.device.capture(step) if graph else step
    done = 0

    def counted() -> None:
        nonlocal done
        run()
        done += 1
        if path.recording != "off" and done % RING == 0:
            path.flush()

    for _ in range(RING):
        counted()
    return counted


PART = Part("recording", measure, (*FILES, "recording.py"), SMALLER)
