"""Which parts the benchmark has, and in which order they are measured."""

from __future__ import annotations

from collections.abc import Sequence

from kvlens.lab.gpu import (
    ceilings,
    decode_parts,
    headlines,
    kernel_checks,
    kernel_times,
    ledger,
    matvec_times,
    offload,
    recording,
    row_gathers,
    step_checks,
    tier,
)
from kvlens.lab.gpu.part import Part

NAMES = (
    "ceilings",
    "checks",
    "step checks",
    "engine",
    "ledger",
    "offload",
    "matvecs",
    "kernels",
    "row gathers",
    "decode",
    "recording",
    "compiled",
    "headlines",
)
"""what a part's name begins with"""


def all_parts(contexts: Sequence[int], batches: Sequence[int]) -> list[Part]:
    """In the order that serves short sittings best: what the others are held against, what proves engine and kernels,
    real offload; then kernels and whole steps, first at the context of the headlines, then at the longest; what few
    will ask for comes last."""
    batches = sorted(set(batches))
    middle, longest = contexts[min(1, len(contexts) - 1)], max(contexts)
    order = list(dict.fromkeys((middle, longest, *contexts)))
    whole = [part for context in order for batch in batches for part in decode_parts.decodes(context, batch)]
    alike = [part for part in whole if part.name.endswith(decode_parts.ALIKE)]
    return [
        ceilings.PART,
        kernel_checks.PART,
        step_checks.PART,
        tier.PART,
        ledger.PART,
        offload.PART,
        matvec_times.PART,
        kernel_times.PART,
        decode_parts.ways(middle),
        *(part for part in whole if part not in alike),
        decode_parts.led_by_host(middle),
        recording.PART,
        *alike,
        decode_parts.sweep(middle),
        row_gathers.PART,
        decode_parts.compiled(middle),
        headlines.PART,
    ]
