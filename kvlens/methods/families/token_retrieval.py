"""Token retrieval: single tokens, chosen by position at every step and brought from the cold tier where they are not on
the device yet.

A method of this family says what it keeps of a token's key on the device (`index`) and by what it ranks tokens
(`score`), and, if it likes, how many of them it takes (`count`). Pages, which leave the window and name what is logged,
recall zone, budgets and the record of scores are the family's. Residency is by (layer, KV head): each has the tokens it
chose last, and no others. Shapes: Hq query heads, H_kv KV heads, G = Hq / H_kv, D head size, T tokens there is room for
in the index, F numbers of a token's entry, W tokens recalled, S span ids.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvlens.methods.families.cold_pages import ColdPages, best
from kvlens.methods.families.cold_plan import ColdPagesParameters, Plan
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import Prefilled
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch

    from kvlens.memory.placement import Selection


@dataclass(frozen=True)
class TokenRetrievalParameters(ColdPagesParameters):
    """Lengths are in tokens. A method of the family gives its own defaults."""

    tokens: int = param(
        0,
        "tokens per KV head that attention may read: sinks, window and selected ones; 0: as many selected ones as the "
        "byte budget holds",
        ours=True,
    )
    page: int = param(
        16, "tokens per page: pages leave the window, and masses and recalls are logged for them", ours=True
    )

    @property
    def least_selected(self) -> int:
        return 1


class TokenRetrieval(ColdPages):
    """Base of the family. `params` is a TokenRetrievalParameters, or has its fields."""

    family = "token_retrieval"

    entry_bits: ClassVar[int] = 0
    """of a number in a token's entry, where it is a code, an integer from 0 on; 0: it is of the model's dtype"""

    @classmethod
    @abstractmethod
    def index_numbers(cls, params: Any, head_dim: int) -> int:
        """F, numbers in the entry of one token of one KV head."""

    @abstractmethod
    def index(self, keys: torch.Tensor) -> torch.Tensor:
        """keys [l, H_kv, m, D], post-RoPE, of the layers that are not dense -> entries [l, H_kv, m, F]."""

    @abstractmethod
    def score(self, at: int, q: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """at: which of the layers that are not dense; q [H_kv, G, D], index [H_kv, T, F], both float32, codes int64 ->
        float32 [H_kv, T], the highest chosen."""

    def count(self, score: torch.Tensor) -> torch.Tensor | None:
        """How many tokens are chosen, int64 0-d or [H_kv]: score [H_kv, T], -inf where there is no token. None: as many
        as there is room for."""
        return None

    def read_besides(self) -> int:
        """Bytes that are read for the choice of one KV head besides the entries of tokens."""
        return 0

    # ----------------------------------------------------------------------------------------------------- the index
    @classmethod
    def unit(cls, params: Any) -> int:
        return 1

    @classmethod
    def index_bytes(cls, params: Any, shape: KVShape) -> int:
        size = cls.entry_bits // 8 or shape.itemsize
        return params.page * shape.kv_heads * cls.index_numbers(params, shape.head_dim) * size

    def allocate(self, plan: Plan, prompt: Prefilled) -> None:
        import torch

        context, params, shape = self.context, self.params, self.context.shape
        size = (shape.layers - params.dense_layers, shape.kv_heads, plan.pages * params.page)
        width = self.index_numbers(params, shape.head_dim)
        dtype = {0: context.dtype, 8: torch.uint8, 16: torch.int16}[self.entry_bits]
        self._index = torch.zeros(*size, width, dtype=dtype, device=context.device)
        self._none = torch.full((shape.kv_heads, 0), -1, dtype=torch.long, device=context.device)

    def enter(self, keys: torch.Tensor, first: int) -> None:
        start = first * self.params.page
        entries = self.checks.finite("index", self.index(keys), (*keys.shape[:3], self._index.shape[3]))
        self._index[:, :, start : start + keys.shape[2]] = entries.to(self._index.dtype)

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        return {} if self._plan is None else {"index": (self._index, self._filled)}

    # ------------------------------------------------------------------------------------------------------ decoding
    def select(self, layer: int, q: torch.Tensor) -> Selection | None:
        import torch

        from kvlens.memory.placement import Selection

        plan, page, shape = self._plan, self.params.page, self.context.shape
        sparse_layer = layer - self.params.dense_layers
        if plan is None or sparse_layer < 0:
            return None
        index = self._index[sparse_layer]
        is_indexed = torch.arange(index.shape[1], device=q.device) < self._filled * page
        entries = index.long() if self.entry_bits else index.float()
        score = self.score(sparse_layer, q.float().unflatten(0, (shape.kv_heads, -1)), entries)
        score = self.checks.tensor("score", score, ((shape.kv_heads, len(is_indexed)),), layer=layer)
        score = score.masked_fill(~is_indexed, float("-inf"))
        self.checks.rankable("score", score, layer)
        rows, count = best(score, plan.recall), self.count(score)
        if count is not None:
            place = torch.arange(rows.shape[1], device=q.device)
            rows = rows.masked_fill(place >= count.reshape(-1, 1), -1)
        spans = (rows.div(page, rounding_mode="floor") + plan.first_id).clamp(min=0)
        fine = torch.zeros(shape.kv_heads, plan.first_id + plan.pages, dtype=torch.bool, device=q.device)
        fine.scatter_(1, spans.masked_fill(rows < 0, 0), True)
        fine[:, 0] = False  # id 0, the window's, stood in for 'no token'
        logged = torch.full(fine.shape, float("nan"), device=q.device)
        logged[:, plan.first_id :] = (
            score.unflatten(1, (-1, page)).amax(-1).masked_fill(~is_indexed[::page], float("nan"))
        )
        return Selection(
            fine[:, None].expand(-1, shape.group, -1),
            self._none,
            rows=(rows + plan.sinks).masked_fill(rows < 0, -1),
            score=logged,
            index_bytes=self._pages * page * index.shape[-1] * index.element_size() + self.read_besides(),
        )
