"""What one generation is asked for, and what came out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from kvlens.engine.surprisal import Surprisals
from kvlens.instruments import Loss
from kvlens.records import SelfCheck

Progress = Callable[[str, int, int], None]
"""phase ('prefill' | 'place' | 'decode'), done, total (tokens)"""


class Cancelled(Exception):
    """The caller asked to stop; what was recorded so far is kept, with its self-checks."""

    def __init__(self) -> None:
        super().__init__("cancelled")
        self.checks: list[SelfCheck] = []


@dataclass(frozen=True)
class Options:
    """How to generate and what to log. temperature 0 is greedy; top_p and seed matter above it."""

    max_new: int = 64
    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    """stop after the token with which the output contains one of these"""
    ignore_eos: bool = False
    """go on to max_new tokens whatever comes"""
    prefill_chunk: int = 512
    """tokens; 0: the whole prompt at once"""
    forced: tuple[int, ...] | None = None
    """token ids to feed instead of the method's own choices; the run has as many steps. Where the prompt's question is
    fed after the context was placed, they begin with it"""
    planned: int | None = None
    """decode steps that the device is divided for, those of a question apart; None: as many as the run can have. A
    forced repeat of a run that was to have more steps than it came to needs the run's number: budget and zones depend
    on it"""
    top_k: int = 16
    coverage: bool = False
    phases: bool = False
    """time the phases of every recorded step; on a CPU alone, as elsewhere the host only begins what a device does"""
    oracle: str = "auto"
    """at which steps and layers full attention by span is recorded, see kvlens.recording.sampling; nothing without
    coverage"""

    def __post_init__(self) -> None:
        if self.max_new < 1:
            raise ValueError("--max-new must be at least 1 token.")
        if self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError("temperature must be at least 0 and top_p in (0, 1].")
        if self.prefill_chunk < 0 or self.top_k < 1:
            raise ValueError("prefill_chunk must be at least 0 and top_k at least 1.")
        if self.forced is not None and not self.forced:
            raise ValueError("a forced run needs at least one token to feed.")

    def steps(self, question_tokens: int = 0) -> int:
        """Decode steps at most, `question_tokens` of which feed a question."""
        return len(self.forced) if self.forced is not None else question_tokens + self.max_new

    def divided(self, question_tokens: int = 0) -> int:
        """Decode steps that the device is divided for, `question_tokens` of which feed a question. Raises ValueError
        when the run has more."""
        steps = self.steps(question_tokens)
        if self.planned is None:
            return steps
        if question_tokens + self.planned < steps:
            raise ValueError(
                f"the device is divided for {question_tokens + self.planned} steps, and the run has {steps}."
            )
        return question_tokens + self.planned


@dataclass
class Result:
    """What came out. Times in seconds."""

    ids: list[int]
    """one per step; a question that was fed after the context comes first"""
    text: str
    """the answer"""
    surprisal: Surprisals
    """of the prompt's tokens; of a run that was not recorded the last one's alone, unless its method needs all"""
    logprobs: list[float]
    stopped: str
    """eos | stop | length | forced"""
    prefill_s: float
    decode_s: float
    """of the whole loop, without the comparison with a reference and without standing still between steps"""
    step_s: list[float]
    peak_bytes: int
    """largest device-resident KV bytes inside any decode step"""
    checks: list[SelfCheck]
    logits: list[torch.Tensor] = field(default_factory=list)
    """float32 [V] per step, only when asked for"""
    losses: list[Loss | None] = field(default_factory=list)
    """per step, where a reference was given; None where the contexts differ"""
    kernels: str = ""
    """what attention ran on: torch, triton or both"""
    unannounced_bytes: int = 0
    """device bytes that the method held and did not announce, at most; they are of `peak_bytes`"""
    second_reading: tuple[int, float] = (0, 0.0)
    """tokens that went through the model once more before the prompt was placed, for a method that reads it twice, and
    the seconds that took, a part of `prefill_s`"""
    link_host_wait_s: float = 0.0
    """how long the host stood still for the link, the model's own waiting apart"""
    full_kv_s: float | None = None
    """spent on full KV beside the run, for its own attention; None: that was not recorded"""
    no_full_kv: str | None = None
    """why full KV's own attention was not recorded, of some steps or all; None: it was, or nobody asked"""
