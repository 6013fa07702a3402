"""Where heads look while a model copies an answer out of its prompt: generated needle prompts under full attention.

Retrieval heads are those that look at the answer's tokens then (Wu et al., Retrieval Head Mechanistically Explains
Long-Context Factuality; Fu et al., Not All Heads Matter, sec. 3.1). The mean of the mass, in place of a count of the
steps at which it is largest, is ours. Shapes: Hq query heads, H_kv KV heads, n prompt tokens,
m tokens of the answer, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from kvlens import tasks
from kvlens.engine.engine import Engine
from kvlens.engine.hf_attention import SessionCache
from kvlens.engine.models import LoadedModel
from kvlens.engine.prefill import ReadPrompt
from kvlens.tasks.encoding import encoding_of
from kvlens.text.prompts import Prompt, tokenize

FIRST_SEED = 9_200_000
"""no benchmark's prompts have these seeds"""


class _Copying:
    """A session of one pass over an answer, behind a prompt that has been read: attends all, and notes how much each
    query head of each layer attends `answer` int64 [a], positions of the prompt."""

    def __init__(self, read: ReadPrompt, answer: torch.Tensor) -> None:
        self.read, self.answer = read, answer
        self.mass: dict[int, torch.Tensor] = {}
        self._new: tuple[torch.Tensor, torch.Tensor] = torch.empty(0), torch.empty(0)

    def tokens_seen(self, layer: int) -> int:
        return self.read.keys.shape[2]

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._new = keys, values

    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        """q [1, Hq, m, D] -> output of the same shape."""
        both = zip((self.read.keys, self.read.values), self._new, strict=True)
        keys, values = (torch.cat((old[layer], new), 1).float() for old, new in both)
        n, m = self.tokens_seen(layer), q.shape[2]
        scores = q[0].float().unflatten(0, (keys.shape[0], -1)) @ keys[:, None].mT * scaling
        scores[..., n:] += torch.full((m, m), -math.inf, device=q.device).triu(1)
        weights = scores.softmax(-1)
        self.mass[layer] = weights[..., self.answer].sum(-1).mean(-1).flatten()
        out: torch.Tensor = (weights @ values[:, None]).flatten(0, 1)[None].to(q.dtype)
        return out


def answer_tokens(prompt: Prompt, answer: str) -> list[int]:
    """Positions of the tokens that an answer consists of where the needle says it."""
    value, text = answer.strip().rstrip("."), prompt.source.text
    sentences = [
        (position, position + len(value)) for a, b in prompt.source.needle if (position := text.find(value, a, b)) >= 0
    ]
    results = enumerate(prompt.offsets[: len(prompt.ids) - 1])
    return [i for i, o in results if o is not None and any(o[0] < end and o[1] > start for start, end in sentences)]


@torch.inference_mode()
def needle_scores(
    loaded: LoadedModel, prompts: int, length: int, task: tasks.Task | None = None, first_seed: int = FIRST_SEED
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Mean attention mass [L, Hq] on the answer's tokens of the prompt while the answer is fed, over `prompts` needle
    prompts of at most `length` tokens; and what they were, for the provenance. task: None: the first that models of
    this kind are measured on. Raises ValueError where the model has no room for them."""
    engine, encoding = Engine(loaded), encoding_of(loaded.tokenizer)
    task = task or tasks.get(tasks.usual(loaded.name)[0])
    length = min(length, loaded.max_positions - task.new_tokens)
    total = torch.zeros(loaded.shape.layers, loaded.shape.q_heads)
    for index in range(prompts):
        depth, seed = (index + 0.5) / prompts, first_seed + index
        request = tasks.ask(task, length, depth, seed, encoding, index)
        prompt = tokenize(tasks.prompt_of(request), loaded.tokenizer, loaded.max_positions, task.new_tokens)
        answer = loaded.tokenizer(request.answer, add_special_tokens=False)["input_ids"]
        results = answer_tokens(prompt, request.answer)
        assert results, "a needle says its answer"
        device = loaded.model.device
        copying = _Copying(engine.read(prompt), torch.tensor(results, device=device))
        fed = torch.tensor([[prompt.ids[-1], *answer[:-1]]], device=device)
        loaded.model.base_model(
            input_ids=fed, past_key_values=SessionCache(copying, loaded.shape.layers), use_cache=True
        )
        total += torch.stack([copying.mass[layer] for layer in range(loaded.shape.layers)]).cpu()
    lines = {"task": task.name, "prompts": prompts, "length": length, "first_seed": first_seed}
    return total / max(1, prompts), lines
