"""Means over the steps of a run that is not stored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvlens.records import PrefillRecord, StepRecord
from kvlens.studies.counts import Count, corrected, reused

KEPT_OUTPUT = 200
"""characters of an output"""


def output_figures(output: str) -> dict[str, str]:
    """Return the output's beginning, and the whole of it for the task's score, which is not kept."""
    return {"output": output[:KEPT_OUTPUT], "whole_output": output}


class Means:
    """A sink that keeps what the tables need of every step."""

    def __init__(self) -> None:
        self.coverage: list[float] = []
        self.recall: list[float] = []
        self.attended: list[float] = []
        self.read: list[float] = []
        self.h2d: list[float] = []
        self.d2h: list[float] = []
        self.cold: list[float] = []
        self.reused: list[Count] = []
        self.corrected: list[Count] = []

    def prefill(self, record: PrefillRecord) -> None:
        """Nothing to keep: offloading the prompt is prefill's work."""

    def step(self, record: StepRecord) -> None:
        self.coverage.append(float(record.head["coverage"].mean()))
        self.recall.append(float(record.head["selection_recall"].mean()))
        self.attended.append(float(record.kv["attended_tokens"].mean()))
        self.read.append(float(record.kv["read_bytes"].sum()))
        self.h2d.append(float(record.kv["h2d_bytes"].sum()))
        self.d2h.append(float(record.kv["d2h_bytes"].sum()))
        assert record.cold_bytes is not None  # NULL in imported traces alone
        self.cold.append(float(record.cold_bytes))
        if record.step:  # at the first step nothing can be on the device yet
            on_device, selected = reused(record)
            self.reused.append((float(on_device.sum()), float(selected.sum())))
            self.corrected += [corrected(record)] if "corrected" in record.head else []

    def figures(self) -> dict[str, float]:
        """Return means over the steps: coverage and selection recall also over layers and query heads, attended tokens
        over layers and KV heads; bytes per step over all of them. Shares of reused tokens and of corrected heads are of
        all steps after the first together; a share is missing where there was nothing to count."""
        return {
            "coverage": float(np.mean(self.coverage)),
            "selection_recall": float(np.mean(self.recall)),
            "attended_tokens": float(np.mean(self.attended)),
            "read_bytes_per_step": float(np.mean(self.read)),
            "h2d_bytes_per_step": float(np.mean(self.h2d)),
            "d2h_bytes_per_step": float(np.mean(self.d2h)),
            "cold_bytes": float(np.mean(self.cold)),
            **_share("reused_share", self.reused),
            **_share("corrected_share", self.corrected),
        }


def _share(name: str, counts: Sequence[Count]) -> dict[str, float]:
    """Return {name: part of the whole} of all counts together; {} if there is no whole."""
    part, whole = np.sum(counts, axis=0) if counts else (0.0, 0.0)
    return {name: float(part / whole)} if whole else {}
