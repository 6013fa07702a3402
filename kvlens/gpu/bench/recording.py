"""What recording adds to a whole decode step: nothing, a few numbers per query head, the mass of every span besides.

Masses come out of k1, from the pass that attends; they are summed up by role and by span in rings on the device, which
the host reads every 16 steps, and that is in the times. Kvlens's recorder and store run on the host and are not in them
(docs/benchmarks.md).
"""

from __future__ import annotations

import statistics
from typing import Literal

import torch

from kvlens.gpu.bench import decode
from kvlens.gpu.bench.device import p95
from kvlens.gpu.bench.part import Bench, Part
from kvlens.gpu.bench.result import RecordingRow

Recording = Literal["off", "heads", "spans"]
KINDS: tuple[Recording, ...] = ("off", "heads", "spans")
RING = 16
METHOD = "freekv"


@torch.inference_mode()
def measure(bench: Bench) -> list[RecordingRow]:
    context = bench.contexts[min(1, len(bench.contexts) - 1)]
    found: list[RecordingRow] = []
    for recording in KINDS:
        made = decode.begin(
            bench,
            METHOD,
            context,
            bench.rates.of(METHOD),
            0 if recording == "off" else RING,
            "heads" if recording == "off" else recording,
        )
        try:
            made.steps(1 if bench.dry else decode.WARM)
            for graph in (False, True):
                times = made.times(graph and not bench.dry, bench.repeats)
                median = statistics.median(times)
                off = next((row.median for row in found if row.graph == graph and row.recording == "off"), median)
                found.append(RecordingRow(recording, graph, context, 1, median, p95(times), median / off - 1, METHOD))
        finally:
            made.close()
            bench.device.release()
    return found


PART = Part("recording", measure, (*decode.FILES, "recording.py"), decode.SMALLER, replays=True)
