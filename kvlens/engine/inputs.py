"""What each layer's attention is given while a prompt is read, for methods that score by the model's projections."""

from __future__ import annotations

from typing import Any, Self

import torch

from kvlens.engine.hf_attention import attention_modules
from kvlens.methods.run_inputs import Inputs


class Gathering:
    """Within it, what goes into the attention of every layer is kept, chunk after chunk. Raises ValueError for a model
    in which the attention of every layer cannot be told."""

    def __init__(self, model: Any, layers: int, method: str) -> None:
        modules = attention_modules(model, layers)
        if modules is None:
            raise ValueError(
                f"{method} needs what each layer's attention is given, which kvlens cannot see in this model."
            )
        self._modules, self._rotary = modules, getattr(model.base_model, "rotary_emb", None)
        self._given: list[list[torch.Tensor]] = [[] for _ in modules]
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        for layer, module in enumerate(self._modules):
            self._hooks.append(module.register_forward_pre_hook(self._hook(layer), with_kwargs=True))
        return self

    def __exit__(self, *raised: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _hook(self, layer: int) -> Any:
        def note_inputs(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            self._given[layer].append(hidden[0])

        return note_inputs

    def gathered(self) -> Inputs:
        """All of it; nothing is kept here afterwards."""
        hidden = torch.stack([torch.cat(chunks) for chunks in self._given])
        self._given = [[] for _ in self._modules]
        return Inputs(hidden, tuple(self._modules), self._rotary)
