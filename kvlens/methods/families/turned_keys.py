"""Token retrieval by few dimensions of turned keys: products of queries and keys are estimated in the dimensions that
gather most of them, which the device keeps; the tokens themselves are in host memory.

A method of this kind says the axes (`axes`). Shapes as in token_retrieval.py; w dimensions.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from kvlens.methods.families.cold_plan import Plan
from kvlens.methods.families.token_retrieval import TokenRetrieval
from kvlens.methods.run_inputs import MemoryView, Prefilled, StepEnd
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch

    from kvlens.methods.hooks import WindowLeave


class TurnedKeys(TokenRetrieval):
    """Base; `params.partial` is the share of a key's dimensions, `params.most_fetched` the share of the tokens so far
    that a KV head fetches at most."""

    @abstractmethod
    def axes(self, prompt: Prefilled, width: int) -> torch.Tensor:
        """Return the axes of the layers that are not dense: float32 [l, H_kv, D, width], orthonormal columns."""

    @classmethod
    def index_numbers(cls, params: Any, head_dim: int) -> int:
        return max(1, round(params.partial * head_dim))

    @classmethod
    def own_bytes(cls, params: Any, shape: KVShape, plan: Plan) -> int:
        return shape.kv_heads * shape.head_dim * cls.index_numbers(params, shape.head_dim) * shape.itemsize

    @classmethod
    def most(cls, params: Any, plan: Plan) -> int:
        return max(1, min(super().most(params, plan), int(params.most_fetched * (plan.prompt_tokens + plan.max_new))))

    def allocate(self, plan: Plan, prompt: Prefilled) -> None:
        super().allocate(plan, prompt)
        self._tokens = plan.prompt_tokens + 1
        self._turn = self.axes(prompt, self._index.shape[-1]).to(self._index.device, self._index.dtype)

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        held = super().held()
        return held and {**held, "turn": (self._turn,)}

    def index(self, keys: torch.Tensor) -> torch.Tensor:
        return keys.float() @ self._turn.float()

    def score(self, sparse_layer: int, q: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Estimated products, the largest of the group's."""
        logits = (q @ self._turn[sparse_layer].float()) @ index.transpose(-1, -2)
        return logits.amax(1) * q.shape[-1] ** -0.5

    @property
    def most_now(self) -> int:
        """Tokens that a KV head fetches at most at this step."""
        return max(1, int(self.params.most_fetched * self._tokens))

    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        self._tokens = end.position + 2
        return super().decode_end(end, memory)
