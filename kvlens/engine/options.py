"""What one generation is asked for, the rules of the model's generation_config that change which token greedy
`generate` takes, and what came out. The rules' processors are transformers' own, in the order `generate` uses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from kvlens.engine.prefill import Surprisals
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

    def along(self, ids: Sequence[int]) -> Options:
        """Return these options for a repeat on other tokens, with the device divided as for the run itself."""
        return replace(self, forced=tuple(ids), planned=self.planned or self.max_new)

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
    most_rows: int = 1
    """runs whose steps were computed together, at most, this one included"""
    full_kv_s: float | None = None
    """spent on full KV beside the run, for its own attention; None: that was not recorded"""
    no_full_kv: str | None = None
    """why full KV's own attention was not recorded, of some steps or all; None: it was, or nobody asked"""


RULES = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "min_length",
    "min_new_tokens",
    "sequence_bias",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
    "begin_suppress_tokens",
    "exponential_decay_length_penalty",
    "remove_invalid_values",
)
"""fields of a generation_config that become logits processors without sampling"""
IDLE = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0}
"""of these, numbers with the value that changes nothing"""


class NonFiniteLogits(ValueError):
    """A model gave logits that are no numbers, so that no token can be chosen."""

    code = "non_finite_logits"

    def __init__(self, step: int, dtype: str) -> None:
        super().__init__(
            f"{self.code}: the model's logits at step {step} are not finite in {dtype}: run with --dtype float32 or "
            "bfloat16, or check the weights."
        )
        self.step = step


class GenerationRules:
    """The scores from which a token is chosen, given a step's logits and the tokens before."""

    def __init__(self, model: Any, prompt_tokens: int, max_new: int) -> None:
        """prompt_tokens: of the prompt with its question; max_new: tokens that are generated at most."""
        self.dtype = str(model.dtype).removeprefix("torch.")
        self.processors: Any = ()
        if rules_of(model):
            self.processors = _processors(model, prompt_tokens, max_new)

    def scores(self, logits: torch.Tensor, ids: list[int], step: int) -> torch.Tensor:
        """Return logits [V] after the rules; the same tensor if the model has none. ids: all tokens before.

        Raises NonFiniteLogits for NaN and infinities."""
        if not bool(logits.isfinite().all()):
            raise NonFiniteLogits(step, self.dtype)
        if not self.processors:
            return logits
        previous_ids = torch.tensor([ids], device=logits.device)
        scores: torch.Tensor = self.processors(previous_ids, logits[None].float())[0]
        return scores


def rules_of(model: Any) -> dict[str, Any]:
    """Return the fields of a model's generation_config that are rules in force: name -> value."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return {}
    values = {name: getattr(config, name, None) for name in RULES}
    return {name: value for name, value in values.items() if not _idle(name, value)}


def _idle(name: str, value: Any) -> bool:
    """Whether a rule with this value changes nothing."""
    return value is None or value is False or value == [] or value == {} or (name in IDLE and value == IDLE[name])


def _processors(model: Any, prompt_tokens: int, max_new: int) -> Any:
    """transformers' logits processors for greedy decoding under the model's generation_config."""
    from transformers import LogitsProcessorList

    config = copy.deepcopy(model.generation_config)
    config.do_sample, config.num_beams = False, 1
    config.max_length, config.max_new_tokens = prompt_tokens + max_new, max_new
    if config.min_new_tokens is not None:
        config.min_length = prompt_tokens + config.min_new_tokens
    model._prepare_special_tokens(config, True, device=model.device)
    return model._get_logits_processor(
        generation_config=config,
        input_ids_seq_length=prompt_tokens,
        encoder_input_ids=None,
        prefix_allowed_tokens_fn=None,
        logits_processor=LogitsProcessorList(),
        device=model.device,
        model_kwargs={},
    )
