"""What recording adds to a whole decode step: nothing, a few numbers per query head, the mass of every span besides.

Masses come out of k1, from the pass that attends; they are summed up by role and by span in rings on the device, which
the host reads every 16 steps, and that is in the times. Kvlens's recorder and store run on the host and are not in them
(docs/evidence/benchmarks.md).
"""

from __future__ import annotations

import statistics
from typing import Literal

import torch

from kvlens.lab.gpu import decode
from kvlens.lab.gpu.decoding import WARM, begin
from kvlens.lab.gpu.device import p95
from kvlens.lab.gpu.part import Bench, Part
from kvlens.lab.gpu.settings import Setting, settings
from kvlens.lab.results.gpu import RecordingRow

Recording = Literal["off", "heads", "spans"]
KINDS: tuple[Recording, ...] = ("off", "heads", "spans")
RING = 16


def busiest(bench: Bench) -> Setting:
    """The setting whose step has most in it: a recall that is waited for and one that is not; else the first that
    recalls, else the first."""
    known_values, kv = list(settings().values()), bench.model.kv
    replayed = [setting for setting in known_values if setting.rates and setting.shape is not None]
    both = [
        setting
        for setting in replayed
        if setting.shape and 0 < setting.shape(kv, bench.contexts[0], setting.rates).waited < 1
    ]
    return (both or replayed or known_values)[0]


@torch.inference_mode()
def measure(bench: Bench) -> list[RecordingRow]:
    context, setting = bench.contexts[min(1, len(bench.contexts) - 1)], busiest(bench)
    recording_rows: list[RecordingRow] = []
    for recording in KINDS:
        ring, record = (0, "heads") if recording == "off" else (RING, recording)
        result = begin(bench, setting, context, bench.rates.choose(setting), ring, record)
        try:
            result.steps(1 if bench.dry else WARM)
            for graph in (False, True):
                times = result.times(graph and not bench.dry, bench.repeats)
                median = statistics.median(times)
                off = next(
                    (row.median for row in recording_rows if row.graph == graph and row.recording == "off"), median
                )
                added = median / off - 1
                recording_rows.append(
                    RecordingRow(recording, graph, context, 1, median, p95(times), added, setting.name)
                )
        finally:
            result.close()
            bench.device.release()
    return recording_rows


PART = Part("recording", measure, (*decode.FILES, "recording.py"), decode.SMALLER, runs_methods=True)
