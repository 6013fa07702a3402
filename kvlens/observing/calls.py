"""The seam with transformers: the registered attention functions and `Cache.update`, wrapped while a block runs.

The wrappers pass every call through as it came. A watcher sees the keys that a layer writes and, beside the call, what
the layer attends. A watcher may hand back other keys, values and a mask: holds and drops are made so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import modeling_utils
from transformers.cache_utils import Cache

from kvlens.observing.refusals import refuse_attention

ATTENTIONS = ("sdpa", "eager")
"""implementations that are observed; the others make their masks inside a kernel"""
EAGER = "eager_attention_forward"
"""the eager function of a model's own module"""


@dataclass
class Call:
    """One layer's call of its attention function: query [B, Hq, m, D], key and value [B, H_kv, C, D], mask broadcast
    over [B, Hq, m, C] (bool: True is attended; else added to the scores; None: none)."""

    module: Any
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    options: dict[str, Any]
    """the call's further arguments"""
    causal: bool = False
    """without a mask, query row r attends entries 0 to r: torch's own rule (is_causal)"""

    @property
    def layer(self) -> int:
        return int(self.module.layer_idx)


class Watcher(Protocol):
    """Sees the calls of one model."""

    def written_keys(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """A layer hands keys and values [B, H_kv, m, D] to the cache."""

    def cached_keys(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The cache hands a layer all keys and values [B, H_kv, C, D] that it holds."""

    def attends(self, call: Call) -> Call:
        """A layer is about to attend. Returns the call to make, usually the same."""

    def attended(self, call: Call, output: torch.Tensor) -> None:
        """The call was made: output [B, m, Hq, D]."""


def attention_modules(model: Any) -> list[Any]:
    """Return the attention modules of a decoder in the order of their layers."""
    modules = [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")]
    return sorted(modules, key=lambda module: int(module.layer_idx))


def check_attention(model: Any) -> str:
    """Return the model's attention implementation. Raises CannotObserve for one without readable masks."""
    name = getattr(model.config, "_attn_implementation", None)
    if name not in ATTENTIONS:
        raise refuse_attention(name, ATTENTIONS)
    return str(name)


@contextmanager
def watching(model: Any, watcher: Watcher) -> Iterator[None]:
    """Inside, `watcher` sees the model's calls. Afterwards the functions are the ones from before, unless something
    else has wrapped them meanwhile: then the wrapper stays and passes calls through."""
    check_attention(model)
    modules = attention_modules(model)
    owned = {id(module) for module in modules}
    state = {"open": True}
    with ExitStack() as stack:
        for home in {type(module).__module__ for module in modules}:
            _wrap_functions(stack, sys.modules[home], owned, watcher, state)
        for kind in _overriding(Cache):
            _wrap_update(stack, kind, watcher, state)
        try:
            yield
        finally:
            state["open"] = False


def _wrap_functions(stack: ExitStack, home: Any, owned: set[int], watcher: Watcher, state: dict[str, bool]) -> None:
    """Wrap both attention functions that the model file `home` uses: a press may change from one to the other."""
    functions = getattr(home, "ALL_ATTENTION_FUNCTIONS", modeling_utils.ALL_ATTENTION_FUNCTIONS)
    before = functions["sdpa"]
    wrapped = functions["sdpa"] = _passing(before, owned, watcher, state, causal=True)
    stack.callback(lambda: functions.__setitem__("sdpa", before) if functions["sdpa"] is wrapped else None)
    if (original := getattr(home, EAGER, None)) is not None:
        eager = _passing(original, owned, watcher, state)
        setattr(home, EAGER, eager)
        stack.callback(lambda: setattr(home, EAGER, original) if getattr(home, EAGER) is eager else None)


def _passing(
    original: Callable[..., Any], owned: set[int], watcher: Watcher, state: dict[str, bool], causal: bool = False
) -> Callable[..., Any]:
    """Return a function that makes the original's call and shows it to the watcher. causal: the original masks what
    comes later where it is given no mask."""

    def attention(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not state["open"] or id(module) not in owned:
            return original(module, query, key, value, attention_mask, *args, **kwargs)
        ordered = causal and bool(kwargs.get("is_causal", getattr(module, "is_causal", True)))
        call = watcher.attends(Call(module, query, key, value, attention_mask, kwargs, ordered))
        result = original(module, query, call.key, call.value, call.mask, *args, **kwargs)
        watcher.attended(call, result[0])
        return result

    return attention


def _overriding(kind: type) -> list[type]:
    """Return the class and its subclasses, as far as they have an `update` of their own."""
    kinds, left = [], [kind]
    while left:
        current = left.pop()
        left += current.__subclasses__()
        if "update" in vars(current):
            kinds.append(current)
    return kinds


def _wrap_update(stack: ExitStack, kind: type, watcher: Watcher, state: dict[str, bool]) -> None:
    """Wrap the `update` of a cache class: the watcher hears once of each call, whichever class calls its base."""
    original: Any = vars(kind)["update"]

    def update(
        self: Any, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        outermost = not state.get("inside", False)
        if outermost and state["open"]:
            watcher.written_keys(layer_idx, key_states, value_states)
        state["inside"] = True
        try:
            result = original(self, key_states, value_states, layer_idx, *args, **kwargs)
            if outermost and state["open"]:
                watcher.cached_keys(layer_idx, *result[:2])
            return result
        finally:
            state["inside"] = not outermost

    kind.update = update  # type: ignore[attr-defined]
    stack.callback(lambda: setattr(kind, "update", original) if vars(kind).get("update") is update else None)
