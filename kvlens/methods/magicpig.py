"""MagicPIG: tokens sampled by hash tables of keys, each weighed by how likely it was to be sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.read_on_device import ReadOnDevice
from kvlens.methods.fitting import clamp
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch

    from kvlens.memory.placement import Selection

IMPOSSIBLE = -1e30
"""logarithm of a probability of 0; a multiple of it by 0 is 0"""
CODE_BYTES = 2
"""of the bits of one key in one table, int16"""


@dataclass(frozen=True)
class MagicPIGParameters:
    """Lengths are in tokens. Defaults are those of the authors' code."""

    bits: int = param(10, "bits of a hash, each the side of a random plane on which a vector is", symbol="K")
    tables: int = param(150, "hash tables", symbol="L")
    hits: int = param(2, "tables in which a key and a query have equal hashes: so many, and the key is sampled")
    sinks: int = param(4, "first tokens, always attended and in no table")
    local: int = param(64, "last prompt tokens, always attended and in no table, like all decoded ones")
    dense_every: int = param(16, "layers whose number it divides attend everything, the first one too; 0: none does")
    least: float = param(
        1e-4,
        "added to a probability before its logarithm, so that a rarely sampled token does not outweigh the "
        "others (the authors' reference code)",
    )
    centred: str = param(
        "true", "the mean key is subtracted before keys are hashed", choices=("true", "false"), symbol="c"
    )
    page: int = param(16, "tokens per page: pages are the spans that masses and rankings are logged for", ours=True)

    def __post_init__(self) -> None:
        for name in ("tables", "hits", "page"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1.")
        if not 1 <= self.bits <= 15:
            raise ValueError("bits must lie between 1 and 15, so that a hash fits into 2 bytes.")
        if self.hits > self.tables:
            raise ValueError(f"hits must be at most tables, {self.tables}.")
        for name in ("sinks", "local", "dense_every", "least"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """The last prompt tokens that are always attended are a 16th of the prompt, 64 at most (ours). Bits and tables
        stay: they decide which cosines are sampled, not how many tokens."""
        return {"local": clamp((prompt_tokens + 1) / 16, 4, 64)}

    def is_dense(self, layer: int) -> bool:
        """Return True if the layer attends everything."""
        return self.dense_every > 0 and layer % self.dense_every == 0

    def misfit(self, prompt_tokens: int) -> str | None:
        """Nothing would be sampled."""
        if self.sinks + self.local < prompt_tokens:
            return None
        always = f"first {self.sinks:,} and the last {self.local:,}"
        return f"it has {prompt_tokens + 1:,} tokens, all attended, since the {always} always are"


class MagicPIG(ReadOnDevice):
    """Keys of the prompt, first and last tokens aside, are hashed into L tables by K random planes each. A query head
    samples the keys that share its hash in at least two tables, which a key at the angle t to the query does with the
    probability u of the binomial distribution of L tries at (1 - t / pi)^K. The softmax runs over sampled and static
    tokens, with log u subtracted from the scores of sampled ones: importance sampling that normalises itself. The mean
    key is subtracted first, which moves all scores of a query alike and spreads the angles. The planes are drawn by the
    run's seed, once for all layers.

    After the authors' code; the paper's text was not at hand. Departures: the authors keep tokens and tables in host
    memory, and the processor there attends the sampled ones; here both are on the device, since the host tier stores
    and does not compute. Reads shrink, memory grows by the tables. Tables are rows of hashes that a step reads whole,
    not buckets; what is sampled is equal. The bits of a product of 0 are 0, as in the authors' code.
    """

    name = "magicpig"
    title = "MagicPIG"
    paper = "Chen et al., MagicPIG: LSH Sampling for Efficient LLM Generation, ICLR 2025"
    summary = (
        "keeps every token on the device; each query head reads the tokens whose hashes collide with its own, and "
        "weighs them by how likely that was"
    )
    Parameters = MagicPIGParameters
    presets = {  # noqa: RUF012
        "paper": {},
        "demo": {"bits": 6, "tables": 40, "local": 16, "dense_every": 0},
    }
    params: MagicPIGParameters

    @classmethod
    def _sparse_layers(cls, params: MagicPIGParameters, shape: KVShape) -> list[int]:
        return [layer for layer in range(shape.layers) if not params.is_dense(layer)]

    @classmethod
    def floor_bytes(cls, params: MagicPIGParameters, shape: KVShape, prompt_tokens: int, max_new: int) -> int:
        """Planes, mean keys and hashes, beside every token."""
        layout = cls._layout(params, shape, prompt_tokens, max_new).bytes(shape)
        layers, hashed = len(cls._sparse_layers(params, shape)), prompt_tokens - params.sinks - params.local
        if hashed <= 0 or not layers:
            return layout
        numbers = hashed * params.tables * CODE_BYTES + shape.head_dim * 4
        return layout + layers * shape.kv_heads * numbers + shape.head_dim * params.bits * params.tables * 4

    def begin(self, prompt: Prefilled) -> None:
        import torch

        p, n, shape = self.params, self.context.prompt_tokens, self.context.shape
        self._first, self._end = p.sinks, n - p.local
        """hashed positions"""
        layers = self._sparse_layers(p, shape)
        self._row = {layer: row for row, layer in enumerate(layers)}
        """layer -> its row in the tables; none where everything is static"""
        if self._end <= self._first or not layers:
            self._row = {}
            return
        keys = prompt.keys[layers, :, self._first : self._end].float()
        self._centre = keys.mean(2) if p.centred == "true" else torch.zeros_like(keys[:, :, 0])
        generator = torch.Generator().manual_seed(self.context.seed)
        planes = torch.randn(shape.head_dim, p.tables * p.bits, generator=generator)
        self._planes = planes.to(self.context.device)
        self._hashes = torch.stack(
            [self._hash(layer - centre[:, None]) for layer, centre in zip(keys, self._centre, strict=True)]
        )

    def _hash(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the hash of each vector [..., D] in each table: int16 [..., L]."""
        import torch

        sides = (vectors @ self._planes > 0).unflatten(-1, (self.params.tables, self.params.bits))
        powers = 2 ** torch.arange(self.params.bits, device=sides.device)
        return (sides * powers).sum(-1).to(torch.int16)

    # --------------------------------------------------------------------------------------------------------- decoding
    def select(self, layer: int, q: torch.Tensor) -> Selection | None:
        import torch
        import torch.nn.functional as F

        from kvlens.memory.placement import Selection

        if layer not in self._row:
            return None
        row, p = self._row[layer], self.params
        q = q.float().unflatten(0, (self.context.shape.kv_heads, -1))
        hashes, of_queries = self._hashes[row], self._hash(q)
        equal = torch.stack(
            [(hashes == of_query[:, None]).sum(-1) for of_query in of_queries.unbind(1)], 1
        )  # [H_kv, G, hashed]
        around = (self._first, self._places - self._end)
        positions = F.pad(equal >= p.hits, around, value=True)
        score = F.pad(equal.amax(1).float(), around, value=torch.nan)
        return Selection(
            self.by_span(positions, False).any(-1),
            self._none,
            positions=positions,
            correct=Weights(p, q, self._centre[row], self._first, self._end),
            score=self.by_span(score, torch.nan).nan_to_num(-1.0).amax(-1).where(self._has_hashed(), torch.nan),
            index_bytes=hashes[0].numel() * CODE_BYTES + (self._centre.shape[-1] + self._planes.numel()) * 4,
        )

    def _has_hashed(self) -> torch.Tensor:
        """Return bool [S]: spans with a token that may be sampled."""
        import torch

        places = torch.arange(self._places, device=self._none.device)
        hashed: torch.Tensor = self.by_span((places >= self._first) & (places < self._end), False).any(-1)
        return hashed

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        if not getattr(self, "_row", None):
            return {}
        return {"hashes": (self._hashes,), "mean keys": (self._centre,), "planes": (self._planes,)}


class Weights:
    """What is added to the scores of one layer's tokens: minus the log of the probability that a query head samples
    them, and 0 for static ones."""

    def __init__(self, params: MagicPIGParameters, q: torch.Tensor, centre: torch.Tensor, start: int, end: int) -> None:
        """q [H_kv, G, D], centre [H_kv, D], float32; hashed positions [start, end)."""
        self._params, self._q, self._centre, self._hashed = params, q, centre, (start, end)

    def __call__(self, keys: torch.Tensor, positions: torch.Tensor, heads: slice) -> torch.Tensor:
        import torch.nn.functional as F

        q = F.normalize(self._q[heads], dim=-1)
        unit = F.normalize(keys.float() - self._centre[heads, None], dim=-1)
        chance = sampling_probability(
            q @ unit.transpose(-1, -2), self._params.bits, self._params.tables, self._params.hits
        )
        start, end = self._hashed
        is_hashed = (positions >= start) & (positions < end)
        return -(chance + self._params.least).log().masked_fill(~is_hashed[:, None], 0.0).float()


def sampling_probability(cosine: torch.Tensor, bits: int, tables: int, hits: int) -> torch.Tensor:
    """Return the probability, float64, that two vectors of these cosines have equal hashes of `bits` random planes in
    at least `hits` of so many tables."""
    import torch

    same = (1 - cosine.double().clamp(-1, 1).arccos() / math.pi) ** bits
    equal, unequal = same.log().clamp(min=IMPOSSIBLE), (-same).log1p().clamp(min=IMPOSSIBLE)
    missed = torch.zeros_like(same)
    for count in range(hits):
        missed += (math.log(math.comb(tables, count)) + count * equal + (tables - count) * unequal).exp()
    return (1 - missed).clamp(0, 1)
