"""Keyformer: heavy hitters by attention with Gumbel noise, whose temperature rises while tokens are given up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlens.methods.families.decode_eviction import DecodeEviction, DecodeEvictionParameters
from kvlens.methods.hooks import Needs
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled, RunContext, StepEnd, torch_seed
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch

    from kvlens.methods.hooks import BagChange
    from kvlens.methods.run_inputs import MemoryView

OBSERVED = 4096
"""last prompt queries that vote"""
ROWS = 64
"""queries whose noise is drawn at a time: never n x n"""


@dataclass(frozen=True)
class KeyformerParameters(DecodeEvictionParameters):
    """Lengths are in tokens. Newest tokens have 30 % of the bag, as in the authors' experiments."""

    recent: int = param(0, "newest tokens, not evicted; 0: `recent_share` of the bag", ours=True)
    recent_share: float = param(0.3, "share of the bag for newest tokens where `recent` is 0")
    start_temperature: float = param(1.0, "temperature while the prompt is read", symbol="tau_init")
    end_temperature: float = param(2.0, "temperature that the run's last step would have", symbol="tau_end")
    noise: bool = param(True, "add Gumbel noise to the logits; off: the score is H2O's with a temperature")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start_temperature <= 0 or self.end_temperature <= 0:
            raise ValueError("start_temperature and end_temperature must be above 0.")
        if not 0 <= self.recent_share < 1:
            raise ValueError("recent_share must be at least 0 and below 1.")


class Keyformer(DecodeEviction):
    """Adds up, per KV head, softmax((logit + noise) / tau) that each token has received from all queries so far, the
    noise drawn from a Gumbel distribution for every logit, tau rising step by step from `start_temperature` to
    `end_temperature`; keeps the newest tokens and, of the others, those with the largest sums (paper sec. 3.3, eq. 9
    and 10, Algorithm 1). When the bag is full, the token with the smallest sum goes for good for each one that comes.

    Departures: the paper keeps a set per query head; here the sums of a KV head's query heads are added. A step's
    logits are read from its attention weights, since a softmax does not change under a shift. Of prompts longer than
    4,096 tokens the last 4,096 queries vote. The run's seed draws the noise. tau rises by the run's number of
    steps at most, as in the authors' code.
    """

    name = "keyformer"
    title = "Keyformer"
    paper = "Adnan et al., Keyformer: KV Cache Reduction through Key Tokens Selection, MLSys 2024"
    summary = (
        "keeps the newest tokens and those that received most attention so far, with noise and a rising temperature; "
        "one goes for every one that comes"
    )
    Parameters = KeyformerParameters
    presets = {"paper": {}}  # noqa: RUF012
    needs = Needs(queries=OBSERVED, weights=True)
    params: KeyformerParameters

    def __init__(self, params: KeyformerParameters, context: RunContext) -> None:
        super().__init__(params, context)
        self._tau, self._votes = params.start_temperature, 0
        self._worth: dict[int, torch.Tensor] = {}
        """the prompt's sums by layer, until the bag is filled"""

    @classmethod
    def own_bytes(cls, params: KeyformerParameters, shape: KVShape, places: int) -> int:
        return shape.layers * shape.kv_heads * places * 4

    def worth(self, prompt: Prefilled, layer: int) -> torch.Tensor:
        import torch

        keys, queries = prompt.keys[layer].float(), prompt.last_queries[layer].float()
        heads, n, size = keys.shape
        sums, skipped = torch.zeros(heads, n, device=keys.device), n - queries.shape[1]
        grouped = queries.unflatten(0, (heads, -1))
        column = torch.arange(n, device=keys.device)
        for start in range(0, queries.shape[1], ROWS):
            rows = grouped[:, :, start : start + ROWS]
            until = skipped + start + rows.shape[2]
            logits = rows @ keys[:, None, :until].mT * size**-0.5
            row = torch.arange(skipped + start, until, device=keys.device)[:, None]
            noisy = self._noisy(logits, (layer, start)).masked_fill(column[:until] > row, -torch.inf)
            sums[:, :until] += (noisy / self.params.start_temperature).softmax(-1).sum((1, 2))
        self._worth[layer] = sums
        return sums

    def usual_recent(self, places: int) -> int:
        return int(places * self.params.recent_share)

    def _noisy(self, logits: torch.Tensor, place: tuple[int, int]) -> torch.Tensor:
        """Return logits with Gumbel noise, drawn on the host from the run's seed and the place."""
        import torch

        if not self.params.noise:
            return logits
        layer, number = place
        drawn = torch.Generator().manual_seed(torch_seed((self.context.seed * 1_000_003 + layer) * 1_000_003 + number))
        even = torch.rand(logits.shape, generator=drawn).clamp(min=1e-20).to(logits.device)
        return logits - (-even.log()).clamp(min=1e-20).log()

    def entered(self, positions: torch.Tensor, prompt: Prefilled) -> None:
        import torch

        worth = torch.stack([self._worth.pop(layer) for layer in range(len(positions))])
        self._sums = worth.gather(-1, positions.clamp(min=0)).masked_fill(positions < 0, 0.0)

    def attended(self, layer: int, heads: range, weights: torch.Tensor, position: torch.Tensor) -> None:
        logits = weights[..., : self._sums.shape[-1]].clamp(min=1e-30).log()
        empty = (weights[..., : self._sums.shape[-1]] <= 0) | (position[:, None, : self._sums.shape[-1]] < 0)
        self._votes += 1
        noisy = self._noisy(logits, (layer, OBSERVED + self._votes)).masked_fill(empty, float("-inf"))
        received = (noisy / self._tau).softmax(-1).sum(1)
        self._sums[layer, heads.start : heads.stop, : received.shape[-1]] += received

    def decode_end(self, end: StepEnd, memory: MemoryView) -> BagChange | None:
        p, steps = self.params, max(self.context.max_new, 1)
        self._tau = p.start_temperature + (p.end_temperature - p.start_temperature) * min(end.step + 1, steps) / steps
        return super().decode_end(end, memory)

    def priority(self) -> torch.Tensor:
        return self._sums

    def replaced(self, places: torch.Tensor) -> None:
        self._sums.scatter_(-1, places[..., None], 0.0)

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        return super().held() | ({"sums": (self._sums,)} if hasattr(self, "_sums") else {})
