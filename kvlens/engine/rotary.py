"""A model's rotary embedding: applied to keys and taken back, for methods that want keys without their positions; and
rotary embeddings whose frequencies depend on the length of the whole text (dynamic NTK, LongRoPE).

`generate` reads a prompt at once, so that a model of the second kind computes every key with the frequencies of the
whole prompt. kvlens reads a prompt in chunks and feeds its last token as step 0: without `whole_length` the first
chunks would get the frequencies of a shorter text.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from kvlens.methods.run_inputs import Rotate
from kvlens.models.errors import UnsupportedModel

CHANGING = ("dynamic", "longrope")
"""Kinds whose frequencies depend on how long the text was when a key was computed: such keys cannot be turned back from
their positions alone."""

LEAST_POSITIONS, MOST_POSITIONS = 1024, 65_536
"""positions of a table of angles: 64 MB in float32 at 128 dimensions; the angles of later positions are computed"""


class Rotary:
    """Turns keys by the model's own frequencies, scaling and layout (halves or pairs, all dimensions or the first
    ones), in float32 at least. `used`: per layer, whether it has positions at all.
    """

    def __init__(
        self,
        embedding: Any,
        apply: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        used: tuple[bool, ...],
        kinds: tuple[str, ...] = (),
        halved: bool = False,
    ) -> None:
        """kinds: of each layer, where kinds of layers have frequencies of their own (Gemma 3), (): all have the same;
        halved: an angle is there once for both dimensions that it turns (gpt-oss)."""
        self._halved = halved
        self._embedding, self._apply, self.used, self._kinds = embedding, apply, used, kinds
        self._tables: dict[tuple[torch.dtype, str], tuple[torch.Tensor, torch.Tensor]] = {}
        """cos and sin [1, N, d] of positions 0 to N - 1, on the CPU, by dtype and kind"""

    def __call__(
        self, keys: torch.Tensor, positions: torch.Tensor, layer: int | None = None, back: bool = False
    ) -> torch.Tensor:
        """keys [..., m, D] at positions [m] -> the same, turned as `layer` does; with `layer` None keys [L, ..., m, D]
        of all layers.

        back: take the turn away instead, so that it and the turn are the identity up to rounding. float32, or float64
        for float64 keys.
        """
        wide = keys if keys.dtype == torch.float64 else keys.float()
        if layer is None and (self._kinds or not all(self.used)):
            return torch.stack([self(k, positions, index, back) for index, k in enumerate(wide)])
        if layer is not None and not self.used[layer]:
            return wide
        cos, sin = self._angles(wide, positions, self._kinds[layer] if self._kinds and layer is not None else "")
        width = cos.shape[-1] * (2 if self._halved else 1)
        turned, rest = wide[..., :width], wide[..., width:]
        flat = turned.reshape(1, -1, *turned.shape[-2:])
        if back:
            scale = (
                cos.square() + sin.square()
            )  # 1 but for scaled embeddings (YaRN), whose scale is taken twice otherwise
            flat = flat / (torch.cat((scale, scale), -1) if self._halved else scale)
            sin = -sin
        flat = self._apply(flat, flat[:, :0], cos, sin)[0]  # the model turns queries and keys; here are no keys
        return torch.cat((flat.view_as(turned), rest), -1)

    def _angles(self, wide: torch.Tensor, positions: torch.Tensor, kind: str = "") -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [1, m, d] of positions [m] in the dtype of `wide`. On the CPU they are rows of a table,
        which is computed once for all layers and steps; its numbers are those that the embedding gives. A compiled step
        cannot ask for the bounds of its positions, and computes them."""
        if positions.device.type == "cpu" and positions.numel() and not torch.compiler.is_compiling():
            least, most = (int(bound) for bound in positions.aminmax())
            if least >= 0 and most < MOST_POSITIONS:
                tables = self._tables.get((wide.dtype, kind))
                if tables is None or most >= tables[0].shape[1]:
                    count = max(LEAST_POSITIONS, 1 << most.bit_length())
                    with torch.inference_mode(False), torch.no_grad():  # gradients may pass through its rows later
                        tables = self._computed(wide, torch.arange(count), kind)
                    self._tables[wide.dtype, kind] = tables
                return tables[0].index_select(1, positions), tables[1].index_select(1, positions)
        return self._computed(wide, positions, kind)

    def _computed(
        self, wide: torch.Tensor, positions: torch.Tensor, kind: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self._embedding(wide, positions[None], *([kind] if kind else []))
        return cos.to(wide.dtype), sin.to(wide.dtype)


@dataclass(frozen=True)
class LayersRotary:
    """A model's rotary embedding on some of its layers, which have numbers of their own from 0 on."""

    rotate: Rotate
    numbers: tuple[int, ...]
    """the model's number of each layer"""

    def __call__(
        self, keys: torch.Tensor, positions: torch.Tensor, layer: int | None = None, back: bool = False
    ) -> torch.Tensor:
        """Turn keys as `Rotary` does; with `layer` None keys [l, ..., m, D] of these layers."""
        if layer is not None:
            return self.rotate(keys, positions, self.numbers[layer], back)
        turned = [self.rotate(part, positions, number, back) for number, part in zip(self.numbers, keys, strict=True)]
        return torch.stack(turned) if turned else keys.float()


def rotary_of(model: Any) -> Rotary | None:
    """The rotary embedding of a transformers decoder; None where it has none, or one that changes with the length of
    the text."""
    base = model.base_model
    embedding = getattr(base, "rotary_emb", None)
    apply = getattr(sys.modules[type(base).__module__], "apply_rotary_pos_emb", None)
    rope_type = getattr(embedding, "rope_type", "default")
    types = rope_type.values() if isinstance(rope_type, dict) else (rope_type,)
    if embedding is None or apply is None or any(kind in CHANGING for kind in types):
        return None
    used = [True] * model.config.num_hidden_layers
    for module in base.modules():
        if hasattr(module, "use_rope") and isinstance(getattr(module, "layer_idx", None), int):
            used[module.layer_idx] = bool(module.use_rope)
        if model.config.model_type == "cohere2" and isinstance(getattr(module, "layer_idx", None), int):
            used[module.layer_idx] = getattr(module, "sliding_window", None) is not None  # others have no positions
    kinds = tuple(model.config.layer_types) if isinstance(rope_type, dict) else ()
    return Rotary(embedding, apply, tuple(used), kinds, model.config.model_type == "gpt_oss")


REREAD = frozenset(["phi3"])
"""families whose `generate` drops the cache and reads the text again when a LongRoPE text passes the border"""


@contextmanager
def whole_length(model: Any, tokens: int) -> Iterator[None]:
    """Compute rotary frequencies for a text of at least `tokens` tokens, as `generate` does for a prompt of that
    length. Every run gets the frequencies of a fresh embedding: dynamic NTK otherwise keeps those of the longest text
    that the model has read. Several lanes of a race may be inside at once, each in its own thread. Do nothing for
    embeddings that do not depend on the length."""
    embedding = getattr(model.base_model, "rotary_emb", None)
    if embedding is None or changing_type(model.config) is None:
        yield
        return
    with _RUNS_LOCK:
        forward = vars(embedding).get("forward")
        if not isinstance(forward, _WholeLength):
            refresh(embedding)
            forward = embedding.forward = _WholeLength(embedding, {"forward": forward} if forward else {})
        forward.runs += 1
    length = _TOKENS.set(tokens)
    try:
        yield
    finally:
        with _RUNS_LOCK:
            forward.leave()
        _TOKENS.reset(length)


_TOKENS: ContextVar[int] = ContextVar("tokens of the text that this thread reads", default=1)
_RUNS_LOCK = threading.Lock()


class _WholeLength:
    """The forward pass of an embedding while runs are in `whole_length`: a function of the positions and of the length
    of the run's text, whatever other runs did to the embedding before. The model keeps it if a lane hangs."""

    def __init__(self, embedding: Any, own_forward: dict[str, Any]) -> None:
        """own_forward: the forward pass that the embedding had of its own, as an attribute; {}: none."""
        self._embedding, self._own_forward = embedding, own_forward
        self._plain = inspect.unwrap(type(embedding).forward)  # without the update of frequencies that decorates it
        self._computing = threading.Lock()
        self.runs = 0

    def leave(self) -> None:
        """Note that a run ends. With the last one the embedding is as it was."""
        self.runs -= 1
        if not self.runs:
            del self._embedding.forward
            vars(self._embedding).update(self._own_forward)

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        embedding = self._embedding
        last = position_ids.max().clamp(min=_TOKENS.get() - 1).reshape(1, 1)
        with self._computing:
            cached = getattr(embedding, "max_seq_len_cached", 0)
            if cached > getattr(embedding, "original_max_seq_len", cached) and int(last) + 1 < cached:
                refresh(embedding)  # a longer text was read
            with torch.inference_mode(False), torch.no_grad():  # frequencies serve passes with gradients, too
                type(embedding).forward(embedding, x, last)  # sets the frequencies for this length
            with torch.no_grad():
                return self._plain(embedding, x, position_ids)


def refresh(embedding: Any) -> None:
    """Set the frequencies of an embedding back to those of a model that has read nothing."""
    with torch.inference_mode(False):
        embedding.inv_freq = embedding.original_inv_freq.to(embedding.inv_freq.device, copy=True)
    if hasattr(embedding, "max_seq_len_cached"):
        embedding.max_seq_len_cached = embedding.original_max_seq_len


def changing_type(config: Any) -> str | None:
    """Return the RoPE type of a config if its frequencies depend on the length of the text, else None."""
    rope = getattr(config, "rope_parameters", None)
    kind = rope.get("rope_type") if isinstance(rope, dict) else None
    return kind if kind in CHANGING else None


def border_of(config: Any) -> int | None:
    """Return the number of tokens beyond which frequencies differ from those of short texts; None if they never do."""
    kind = changing_type(config)
    if kind is None:
        return None
    original = config.rope_parameters.get("original_max_position_embeddings")
    return int(original if kind == "longrope" and original else config.max_position_embeddings)


def frequencies_vary(config: Any, prompt_tokens: int, fed_tokens: int) -> bool:
    """Return whether steps of one run use different frequencies: dynamic NTK beyond its border, or a text that crosses
    the border while it decodes."""
    border = border_of(config)
    if border is None or fed_tokens <= border:
        return False
    return changing_type(config) == "dynamic" or prompt_tokens <= border


def refuse_border(config: Any, prompt_tokens: int, fed_tokens: int) -> None:
    """Raise UnsupportedModel if a text crosses the border at which the model's `generate` reads it again.

    prompt_tokens: of the whole prompt; fed_tokens: prompt and generated tokens that are fed."""
    if config.model_type not in REREAD or changing_type(config) != "longrope":
        return
    border = border_of(config)
    if border is not None and prompt_tokens <= border < fed_tokens:
        raise UnsupportedModel(
            f"{prompt_tokens:,} prompt tokens and the output cross position {border:,}, where this model reads its "
            f"whole text again with other frequencies: lower --max-new to {border - prompt_tokens + 1} or give a "
            "longer prompt."
        )
