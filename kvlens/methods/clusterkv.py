"""ClusterKV: tokens in host memory, chosen by clusters of keys that point the same way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.cold_plan import Plan
from kvlens.methods.families.token_retrieval import TokenRetrieval, TokenRetrievalParameters
from kvlens.methods.fitting import clamp, tokens_within
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ClusterKVParameters(TokenRetrievalParameters):
    """Lengths are in tokens."""

    cluster: int = param(80, "tokens per cluster, on average (sec. 4.1: L / 80 clusters; the authors' code: 400)")
    rounds: int = param(20, "rounds of k-means (the authors' code)")
    sinks: int = param(16, "first tokens always attended, in no cluster")
    window: int = param(
        320, "decoded tokens that are attended until so many are there; they are clustered together then", symbol="m"
    )
    window_rule: str = param("at_most", "the window leaves when it is full", choices=("at_most",), ours=True)
    block: int = param(
        2048,
        "prompt tokens that are clustered together at most: a longer prompt is clustered in blocks, so that the time "
        "grows with the tokens and not with their square; 0: the whole prompt together (the paper)",
        ours=True,
    )
    dense_layers: int = param(2, "first layers that keep every token")
    group: str = param(
        "mean",
        "how the query heads of a KV head rank clusters together: by the mean or the largest of their products",
        choices=("mean", "max"),
        ours=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cluster < 1 or self.rounds < 1:
            raise ValueError("cluster and rounds must be at least 1.")
        if self.block < 0 or 0 < self.block < 2 * self.cluster:
            raise ValueError("block must be 0 or at least twice a cluster's tokens.")

    @property
    def leaves(self) -> int:
        return max(self.page, self.window // self.page * self.page)

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """Clusters are a 13th of the budget's tokens, as 80 of 1,024 in the paper, which is the most. They are larger
        where the centroids would take more of the budget than in the paper, a fifth of it (32,768 tokens, a centroid
        as large as half a token's KV). Ours: decoded tokens wait until they are an eighth of the budget, in whole pages
        of 16, 320 at most; sinks are a 32nd of the budget, 4 to 16; as many of the two dense layers as a quarter of the
        budget holds."""
        whole = prompt_tokens + max_new
        room = tokens_within(shape, budget_bytes, whole)
        cluster = max(room / 13, whole / 2 / (max(room, 1) / 5))
        dense = min(2, int(room / 4 * shape.layers / max(1, whole)))
        window = clamp(room / 8 // 16 * 16, 16, 320)
        sinks = clamp(room / 32, 4, 16)
        return {"cluster": clamp(cluster, 4, 80), "window": window, "sinks": sinks, "dense_layers": dense}


class ClusterKV(TokenRetrieval):
    """Keys of the prompt, first tokens aside, are clustered per KV head by the angle between them (k-means, first
    centroids drawn by the run's seed); a cluster's centroid is the mean of its keys. At every step clusters are ranked
    by q . centroid, and the tokens of the best are read until the budget is full: of the last cluster, those that come
    first. Decoded tokens are attended until the window is full and become clusters of their own then (sec. 4).

    Departures: a prompt above 2,048 tokens is clustered in blocks, as decoded tokens are (`block`); what fills no
    window at the prompt's end waits in it with the decoded tokens; a KV head's query heads
    rank together (paper: each for itself); what was read at the last step stays, cluster or not. The authors' accuracy
    code never clusters decoded tokens, so that long answers have more than the budget there.
    """

    name = "clusterkv"
    title = "ClusterKV"
    paper = "Liu et al., ClusterKV: Manipulating LLM KV Cache in Semantic Space for Recallable Compression, DAC 2025"
    summary = (
        "keeps all but the newest tokens in host memory and, on the device, the centroids of clusters of keys; brings "
        "the tokens of the clusters nearest to the query"
    )
    Parameters = ClusterKVParameters
    presets = {  # noqa: RUF012
        "paper": {"tokens": 16 + 320 + 1024},
        "demo": {"sinks": 4, "window": 16, "cluster": 16, "dense_layers": 0},
    }
    entry_bits = 16
    journal_names = {  # noqa: RUF012
        "cut": "per KV head of a layer: clusters read whole, then tokens left out of the one that was read in part"
    }
    params: ClusterKVParameters

    # ----------------------------------------------------------------------------------------------------- the index
    @classmethod
    def index_numbers(cls, params: Any, head_dim: int) -> int:
        return 1

    @classmethod
    def own_bytes(cls, params: Any, shape: KVShape, plan: Plan) -> int:
        return shape.kv_heads * sum(clusters(params, plan)) * shape.head_dim * shape.itemsize

    def allocate(self, plan: Plan, prompt: Prefilled) -> None:
        import torch

        super().allocate(plan, prompt)
        heads = self._index.shape[:2]
        self._room, self._clusters = plan.recall, 0
        self._first = clusters(self.params, plan)[0]
        size = (*heads, sum(clusters(self.params, plan)), self.context.shape.head_dim)
        self._centroids = torch.zeros(size, dtype=self.context.dtype, device=self.context.device)

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        held = super().held()
        return held and {**held, "centroids": (self._centroids,)}

    def index(self, keys: torch.Tensor) -> torch.Tensor:
        import torch

        from kvlens.methods.families.kmeans import blocks, kmeans, split

        if not keys.shape[2]:
            return keys.new_zeros(*keys.shape[:3], 1)
        count = self._first if self._pages == 0 and self._first else each(self.params)
        labels = torch.empty(keys.shape[:3], dtype=torch.long, device=keys.device)
        tokens = blocks(keys.shape[2], self.params.block)
        for block, of_block in zip(tokens, split(count, len(tokens)), strict=True):
            place = slice(self._clusters, self._clusters + of_block)
            for layer, of_layer in enumerate(keys[:, :, block]):
                centroids, label = kmeans(of_layer, of_block, self.params.rounds, self.context.seed, cosine=True)
                self._centroids[layer, :, place] = centroids.to(self._centroids.dtype)
                labels[layer, :, block] = label + place.start
            self._clusters = place.stop
        return labels[..., None]

    # ------------------------------------------------------------------------------------------------------ decoding
    def read_besides(self) -> int:
        return self._clusters * self._centroids.shape[-1] * self._centroids.element_size()

    def score(self, at: int, q: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        import torch

        products = q @ self._centroids[at].float().transpose(-1, -2)
        score = products.mean(1) if self.params.group == "mean" else products.amax(1)
        label = index[..., 0]
        present = torch.arange(label.shape[1], device=q.device) < self._filled * self.params.page
        size = torch.zeros_like(score).scatter_add(1, label, present.float().expand_as(label))
        ordered = size.gather(1, score.masked_fill(size == 0, float("-inf")).argsort(dim=-1, descending=True))
        covered = ordered.cumsum(1)
        whole = ((covered <= self._room) & (ordered > 0)).sum(1)
        reached = covered.masked_fill(covered < self._room, float("inf")).amin(1) - self._room
        partial_score = reached.masked_fill(reached.isinf(), 0.0)
        self.note("cut", torch.cat((whole.float(), partial_score)), at + self.params.dense_layers)
        return score.gather(1, label)


def each(params: Any) -> int:
    """Clusters of what leaves the window together."""
    return max(1, params.leaves // params.cluster)


def clusters(params: Any, plan: Plan) -> tuple[int, int]:
    """Clusters of the prompt, and of what decoding adds."""
    prompt_tokens_clustered = plan.pages_now * params.page
    later = (plan.pages - plan.pages_now) * params.page // params.leaves
    return (max(1, prompt_tokens_clustered // params.cluster) if prompt_tokens_clustered else 0), later * each(params)
