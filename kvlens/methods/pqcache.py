"""PQCache: tokens in host memory, chosen by keys of a few bits each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.cold_plan import Plan
from kvlens.methods.families.token_retrieval import TokenRetrieval, TokenRetrievalParameters
from kvlens.methods.fitting import clamp, tokens_within
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled, RunContext
from kvlens.refusal import Refusal
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class PQCacheParameters(TokenRetrievalParameters):
    """Lengths are in tokens."""

    parts: int = param(2, "pieces that a key is cut into", symbol="m")
    bits: int = param(6, "bits of the code of a piece: 2 ** bits centroids, 8 at most", symbol="b")
    rounds: int = param(
        25, "rounds of k-means (the authors': as many as the time of prefill allows, 3 to 300)", ours=True
    )
    sample: int = param(
        2048,
        "prompt keys, drawn by the run's seed, whose clusters the centroids are: all keys of a shorter prompt; 0: all",
        ours=True,
    )
    sinks: int = param(32, "first tokens always attended (the authors' code)")
    window: int = param(
        800, "newest tokens always attended, as many as are chosen: a tenth of the prompt in the paper (here of 8,032)"
    )
    group: str = param(
        "sum",
        "how the query heads of a KV head choose together: by sum or largest of their weights",
        choices=("sum", "max"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parts < 1 or not 1 <= self.bits <= 8 or self.rounds < 1:
            raise ValueError("parts and rounds must be at least 1, bits lie between 1 and 8.")
        if self.sample < 0:
            raise ValueError("sample must be at least 0.")

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """Newest and chosen tokens are equally many, as in the authors' code: of a fifth of prompt and answer, or of
        what the budget holds beside codes and centroids. Ours: as many bits, 6 at most, as keep the centroids to a
        tenth of the budget; the first tokens are a 32nd of it."""
        whole = prompt_tokens + max_new
        room = min(tokens_within(shape, budget_bytes, whole), int(0.2 * whole) if budget_bytes is None else whole)
        bits = max(2, min(6, int(room / 5).bit_length() - 1))
        sinks = clamp(room / 32, 4, 32)
        codes = whole / (shape.head_dim * shape.itemsize)  # two bytes a key, in tokens
        beside = room - sinks - 2**bits / 2 - codes - 16
        return {"bits": bits, "sinks": sinks, "window": max(16, int(beside / 2))}


class PQCache(TokenRetrieval):
    """Keys are cut into pieces, and the pieces of the prompt's keys clustered per KV head (product quantisation): the
    device holds, for every key, the number of the nearest centroid of each piece. At every step the products of the
    query's pieces with the centroids give every token an approximate score; its softmax is summed over the query heads
    of a group, and the best tokens are fetched. A token that leaves the window gets the nearest centroids (sec. 3.2).

    Departures: k-means makes a fixed number of rounds from vectors drawn by the run's seed, where the authors' rounds
    depend on measured time; a code takes a whole byte; what was fetched for the last step is not fetched again, where
    they keep blocks of tokens by how often they are used; a prompt above 2,048 tokens has its centroids from a draw of
    so many keys (`sample`).
    """

    name = "pqcache"
    title = "PQCache"
    paper = "Zhang et al., PQCache: Product Quantization-based KVCache for Long Context LLM Inference, SIGMOD 2025"
    summary = (
        "keeps all but the newest tokens in host memory and a code of a few bits per key on the device; brings the "
        "tokens whose coded keys score highest"
    )
    Parameters = PQCacheParameters
    presets = {"paper": {"tokens": 32 + 800 + 800}, "demo": {"sinks": 4, "window": 24, "bits": 4}}  # noqa: RUF012
    entry_bits = 8
    params: PQCacheParameters

    def __init__(self, params: PQCacheParameters, context: RunContext) -> None:
        super().__init__(params, context)
        if context.shape.head_dim % params.parts:
            raise Refusal(
                f"pqcache: keys of {context.shape.head_dim} numbers cannot be cut into {params.parts} parts.",
                code="parts_do_not_divide",
                parts=params.parts,
            )

    # ----------------------------------------------------------------------------------------------------- the index
    @classmethod
    def index_numbers(cls, params: Any, head_dim: int) -> int:
        return int(params.parts)

    @classmethod
    def own_bytes(cls, params: Any, shape: KVShape, plan: Plan) -> int:
        return shape.kv_heads * centroids(params, plan) * shape.head_dim * shape.itemsize

    def allocate(self, plan: Plan, prompt: Prefilled) -> None:
        import torch

        super().allocate(plan, prompt)
        heads, parts, shape = self._index.shape[:2], self.params.parts, self.context.shape
        size = (*heads, parts, centroids(self.params, plan), shape.head_dim // parts)
        self._centroids = torch.zeros(size, dtype=self.context.dtype, device=self.context.device)
        self._known = False
        """the centroids have been found"""

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        held = super().held()
        return held and {**held, "centroids": (self._centroids,)}

    def index(self, keys: torch.Tensor) -> torch.Tensor:
        import torch

        from kvlens.methods.families.kmeans import kmeans, nearest

        if not keys.shape[2]:
            return keys.new_zeros(*keys.shape[:3], self.params.parts)
        codes = []
        for layer, of_layer in enumerate(keys):
            pieces = of_layer.float().unflatten(-1, (self.params.parts, -1)).transpose(1, 2).flatten(0, 1)
            if not self._known:
                p, count = self.params, self._centroids.shape[3]
                new_centroids, _ = kmeans(pieces, count, p.rounds, self.context.seed, cosine=False, sample=p.sample)
                self._centroids[layer] = new_centroids.view(self._centroids.shape[1:])
            code = nearest(pieces, self._centroids[layer].float().flatten(0, 1), cosine=False)
            codes.append(code.unflatten(0, (keys.shape[1], -1)).transpose(1, 2))
        self._known = True
        return torch.stack(codes)

    # ------------------------------------------------------------------------------------------------------ decoding
    def read_besides(self) -> int:
        return self._centroids[0, 0].numel() * self._centroids.element_size()

    def score(self, at: int, q: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        import torch

        pieces = q.unflatten(-1, (self.params.parts, -1)).transpose(1, 2)
        table = pieces @ self._centroids[at].float().transpose(-1, -2)  # [H_kv, parts, G, centroids]
        code = index.transpose(1, 2)[:, :, None].expand(-1, -1, q.shape[1], -1)
        scores = table.gather(3, code).sum(1) * q.shape[-1] ** -0.5
        is_indexed = torch.arange(scores.shape[-1], device=q.device) < self._filled * self.params.page
        weights = scores.masked_fill(~is_indexed, float("-inf")).log_softmax(-1)  # logarithms do not underflow
        return weights.logsumexp(1) if self.params.group == "sum" else weights.amax(1)


def centroids(params: Any, plan: Plan) -> int:
    """Of a piece: as many as the bits can name, and no more than keys that are there to find them."""
    first_tokens = (plan.pages_now or 1) * params.page
    return int(min(2**params.bits, first_tokens))
