"""Retrieval heads of a model, from drawn tokens that are read several times, for which no data is needed, and from
generated needle prompts (kvlens/lab/calibrate/copying.py).

Shapes: Hq query heads, H_kv KV heads, n tokens, P tokens of a period, D head size.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvlens.engine.hf_attention import SessionCache
from kvlens.engine.models import LoadedModel
from kvlens.kernels.attend import prefill_attention
from kvlens.lab.calibrate.copying import needle_scores
from kvlens.lab.calibrate.provenance import provenance, save

ROWS = 128
"""queries whose weights are computed at a time: never n x n"""


class _Reading:
    """A session of one pass over a text: attends exactly and scores every head of each layer."""

    def __init__(self, layers: int, period: int, start: int) -> None:
        self.period, self.first = period, start
        self.echo: list[torch.Tensor] = [torch.empty(0)] * layers
        self.induction: list[torch.Tensor] = [torch.empty(0)] * layers
        self._kv: tuple[torch.Tensor, torch.Tensor] = torch.empty(0), torch.empty(0)

    def tokens_seen(self, layer: int) -> int:
        return 0

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self._kv = keys, values

    def attend(self, layer: int, q: torch.Tensor, scaling: float) -> torch.Tensor:
        keys, values = self._kv
        self.echo[layer], self.induction[layer] = repeated(q[0], keys, scaling, self.period, self.first)
        return prefill_attention(q, keys[None], values[None], scaling)


def repeated(
    q: torch.Tensor, keys: torch.Tensor, scaling: float, period: int, begin: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean attention of a token to its earlier copies, and to the tokens after those: q [Hq, n, D], keys [H_kv, n, D]
    of a text that repeats every `period` tokens from `begin` on -> float32 [Hq] each. Copies of one token add up; the
    mean is over the tokens that have one."""
    n = q.shape[1]
    packed = q.float().unflatten(0, (keys.shape[0], -1))
    wide = keys.float().transpose(-1, -2)[:, None]
    echo = torch.zeros(packed.shape[:2], device=q.device)
    induction = torch.zeros_like(echo)
    column = torch.arange(n, device=q.device)
    for start in range(begin + period, n, ROWS):
        row = torch.arange(start, min(start + ROWS, n), device=q.device)[:, None]
        scores = packed[:, :, start : start + ROWS] @ wide * scaling
        weights = scores.masked_fill(column > row, float("-inf")).softmax(-1)
        apart = row - column
        copies = (column >= begin) & (apart > 0) & (apart % period == 0)
        following = (column > begin) & (apart > 0) & ((apart + 1) % period == 0)
        echo += (weights * copies).sum((-1, -2))
        induction += (weights * following).sum((-1, -2))
    read = n - begin - period
    return (echo / read).flatten(), (induction / read).flatten()


@torch.inference_mode()
def calibrate(
    loaded: LoadedModel,
    out: Path,
    tokens: int = 2500,
    repeats: int = 4,
    seed: int = 0,
    needles: int = 4,
    length: int = 2048,
) -> Path:
    """Measure a model and write the map. `tokens` different ids, as many as the vocabulary and the context allow, are
    drawn without replacement and read `repeats` times after the begin-of-text token. needles: generated prompts of at
    most `length` tokens whose answers are copied; 0: the map has no such score."""
    config, shape = loaded.model.config, loaded.shape
    begin = [] if config.bos_token_id is None else [int(config.bos_token_id)]
    period = min(tokens, config.vocab_size - len(begin), (loaded.max_positions - len(begin)) // repeats)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(config.vocab_size, generator=generator).tolist()
    ids = begin + [token for token in drawn if token not in begin][:period] * repeats
    reading = _Reading(shape.layers, period, len(begin))
    fed = torch.tensor([ids], device=loaded.model.device)
    loaded.model.base_model(input_ids=fed, past_key_values=SessionCache(reading, shape.layers), use_cache=True)
    scores = {"echo": torch.stack(reading.echo), "induction": torch.stack(reading.induction)}
    mapping: dict[str, Any] = {}
    if needles:
        scores["needle"], mapping["needle"] = needle_scores(loaded, needles, length)
    figures = {kind: [[round(x, 6) for x in layer] for layer in total.tolist()] for kind, total in scores.items()}
    origin = provenance(loaded, period=period, repeats=repeats, seed=seed, **mapping)
    return save(out, "heads", figures, origin)
