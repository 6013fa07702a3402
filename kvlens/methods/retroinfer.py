"""RetroInfer: clusters of keys; the best ones are read token by token, the next ones through one entry each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.cluster_entries import LABEL_BYTES, MOST_CLUSTERS, SIZE_BYTES, USE_BYTES, ClusterEntries
from kvlens.methods.families.cold_pages import best
from kvlens.methods.families.cold_plan import ColdPagesParameters, window_from
from kvlens.methods.fitting import clamp, tokens_within
from kvlens.methods.parameters import param
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch

    from kvlens.memory.placement import Selection


@dataclass(frozen=True)
class RetroInferParameters(ColdPagesParameters):
    """Lengths are in tokens. Defaults are those of the authors' code."""

    tokens: int = param(
        0,
        "tokens per KV head on the device: sinks, window and the block cache; 0: a block cache of what the byte budget "
        "leaves",
        ours=True,
    )
    sinks: int = param(4, "first tokens, always attended and in no cluster")
    window: int = param(64, "newest tokens, always attended and in no cluster yet")
    window_rule: str = param(
        "at_least", "a segment leaves when the window holds so many tokens besides", choices=("at_least",), ours=True
    )
    page: int = param(
        1024,
        "tokens of a segment, clustered by themselves (authors' code: 8,192 of the prompt, 1,024 decoded ones)",
        ours=True,
    )
    cluster: int = param(16, "tokens of a cluster, on average")
    rounds: int = param(10, "rounds of k-means")
    retrieval: float = param(0.018, "share of the clusters that are read token by token")
    estimation: float = param(0.232, "share of the clusters, the next ones, that are read through one entry each")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cluster < 1 or self.rounds < 1 or self.page % self.cluster:
            raise ValueError("cluster and rounds must be at least 1, and page a multiple of cluster.")
        if not 0 < self.retrieval <= 1 or not 0 <= self.estimation <= 1:
            raise ValueError("retrieval must lie above 0, estimation at 0 or above, and both at most at 1.")

    def misfit(self, prompt_tokens: int) -> str | None:
        """Labels do not tell so many clusters apart."""
        clusters = window_from(self, 0, prompt_tokens + 1 - self.sinks) // self.page * self.clusters
        return None if clusters <= MOST_CLUSTERS else f"it has {clusters:,} clusters, {MOST_CLUSTERS:,} at most"

    @property
    def least_selected(self) -> int:
        return 1

    @classmethod
    def fit(cls, shape: KVShape, prompt_tokens: int, max_new: int, budget_bytes: int | None) -> dict[str, Any]:
        """Ours. An entry and its centroid take one and a half tokens; clusters have the authors' 16 tokens, and more
        where entries would take over two fifths of the budget. A segment, which takes room twice as it leaves the
        window, is an eighth of the budget, at least two clusters and 1,024 tokens at most. The window is a 32nd of the
        budget, 64 at most. Read token by token is a fifth of the budget's share of full KV, the authors' 1.8 % at
        least."""
        whole = prompt_tokens + max_new
        room = max(1, tokens_within(shape, budget_bytes, whole))
        cluster = clamp(3.75 * whole / room, 16, 64)
        segment = cluster * clamp(room / 8 / cluster, 2, max(2, 1024 // cluster))
        return {
            "cluster": cluster,
            "page": segment,
            "window": clamp(room / 32, 4, 64),
            "retrieval": round(max(0.018, min(1.0, room / whole) / 5), 4),
        }

    @property
    def clusters(self) -> int:
        """Clusters of a segment."""
        return self.page // self.cluster


class RetroInfer(ClusterEntries):
    """Segments of keys are clustered per KV head by the angle between centred keys (spherical k-means, the wave index);
    a cluster's entry is the mean key, the mean value and the number of its tokens. At every step clusters are ranked by
    the group's sum of softmax(q . centroid / sqrt(D)). Tokens of the best are read exactly (retrieval zone), the next
    ones through their entries, with the log of the number of tokens added to the score (estimation zone: number times
    mean value is the paper's summed value), all others not at all; first and newest tokens are always attended (steady
    zone). The wave buffer is the recall zone: clusters that were read stay on the device until those read later need
    the room.

    After the authors' code; the paper's text was not at hand. Departures: segments of the prompt and of decoded tokens
    have one length, and what fills none waits in the window. k-means begins at vectors drawn by the run's seed, the
    code at evenly spaced ones; an entry's key is the mean of its final tokens. The device holds centroids twice, for
    the ranking and as entries. Of the clusters to be read exactly, those that the block cache does not hold pass to the
    estimation zone (the paper has room for all). The authors' cache moves blocks of 8 tokens, here whole clusters,
    token by token.
    """

    name = "retroinfer"
    title = "RetroInfer"
    paper = "Chen et al., RetroInfer: A Vector Storage Engine for Scalable Long-Context LLM Inference, PVLDB 19, 2026"
    summary = (
        "keeps all but the newest tokens in host memory and, on the device, an entry for each cluster of keys; brings "
        "the tokens of the best clusters and estimates the next ones by their entries"
    )
    Parameters = RetroInferParameters
    presets = {  # noqa: RUF012
        "paper": {},
        "demo": {"window": 4, "page": 32, "cluster": 16, "retrieval": 0.15},
    }
    journal_names = {  # noqa: RUF012
        "zones": "per KV head of a layer: clusters read token by token, then clusters read through their entries, then "
        "clusters to be read token by token that the block cache had no room for"
    }
    params: RetroInferParameters

    # ------------------------------------------------------------------------------------------------------ decoding
    def select(self, layer: int, q: torch.Tensor) -> Selection | None:
        import torch
        import torch.nn.functional as F

        from kvlens.memory.placement import Selection

        plan, p, shape, row = self._plan, self.params, self.context.shape, layer - self.params.dense_layers
        if plan is None or row < 0 or not self._pages:
            return None
        sizes, filled = self._sizes[row], self._pages * p.clusters
        logits = q.float().unflatten(0, (shape.kv_heads, -1)) @ self._centroids[row].float().mT * shape.head_dim**-0.5
        exists = sizes > 0
        score = logits.masked_fill(~exists[:, None], -torch.inf).softmax(-1).sum(1).masked_fill(~exists, -torch.inf)
        exact, estimated, refused = self._zones(score, sizes, plan.recall, filled)
        held = self._keep(row, exact, sizes, plan.recall)
        label, present = self._labels[row].long(), self._pages * p.page
        is_token = torch.arange(label.shape[1], device=q.device) < present
        on_device, read = (zone.gather(1, label) & is_token for zone in (held, exact))
        rows = best(torch.where(on_device, 0.0, -torch.inf), plan.recall)
        self.note("zones", torch.cat((exact.sum(1), estimated.sum(1), refused)).float(), layer)
        around = plan.sinks, plan.prompt_tokens + plan.max_new - plan.sinks - label.shape[1]
        positions = F.pad(torch.where(is_token, read, True), around, value=True)
        spans = F.pad(read.unflatten(1, (-1, p.page)).any(-1), (plan.first_id, 0))
        by_segment = score.unflatten(1, (-1, p.clusters)).amax(-1)
        return Selection(
            spans[:, None].expand(-1, shape.group, -1),
            self._none,
            rows=torch.where(rows < 0, -1, rows + plan.sinks),
            positions=positions[:, None].expand(-1, shape.group, -1),
            entries=estimated[:, None],
            members=F.pad(torch.where(is_token, label, -1), around, value=-1),
            score=F.pad(by_segment.masked_fill(by_segment.isinf(), torch.nan), (plan.first_id, 0), value=torch.nan),
            index_bytes=filled * (self._centroids.shape[-1] * self._centroids.element_size() + SIZE_BYTES + USE_BYTES)
            + present * LABEL_BYTES,
        )

    def _zones(
        self, score: torch.Tensor, sizes: torch.Tensor, room: int, filled: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the clusters that are read token by token and through their entries, bool [H_kv, E], and how many of
        the former had no room, int64 [H_kv]: score, sizes [H_kv, E]; room in tokens; so many clusters there are."""
        import torch

        order = score.argsort(dim=-1, descending=True, stable=True)
        exact_count, entry_count = max(1, round(filled * self.params.retrieval)), round(filled * self.params.estimation)
        place, ranked_sizes = torch.arange(score.shape[1], device=score.device), sizes.gather(1, order)
        is_best = (place < exact_count) & (ranked_sizes > 0)
        fits, token_count = torch.zeros_like(is_best), torch.zeros_like(ranked_sizes[:, 0])
        for rank in range(min(exact_count, fits.shape[1])):
            fits[:, rank] = is_best[:, rank] & (token_count + ranked_sizes[:, rank] <= room)
            token_count = token_count + ranked_sizes[:, rank] * fits[:, rank]
        through_entry = (place < exact_count + entry_count) & (ranked_sizes > 0) & ~fits
        exact, estimated = (torch.zeros_like(zone).scatter(1, order, zone) for zone in (fits, through_entry))
        return exact, estimated, (is_best & ~fits).sum(1)

    def _keep(self, row: int, exact: torch.Tensor, sizes: torch.Tensor, room: int) -> torch.Tensor:
        """Return the clusters that are on the device from now on, bool [H_kv, E]: those read token by token, and as
        many of the others that are there as fit, the last read first."""
        import torch

        used = self._used[row]
        used.masked_fill_(exact, self._step)
        order = used.argsort(dim=-1, descending=True, stable=True)
        fits = sizes.gather(1, order).mul(used.gather(1, order) >= 0).cumsum(1) <= room
        held = torch.zeros_like(fits).scatter(1, order, fits) & (used >= 0)
        used.masked_fill_(~held, -1)
        return held
