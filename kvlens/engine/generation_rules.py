"""The rules of a model's generation_config that change which token greedy `generate` takes: repetition penalty,
suppressed and forced tokens, least lengths. The processors are transformers' own, in the order `generate` uses."""

from __future__ import annotations

import copy
from typing import Any

import torch

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
