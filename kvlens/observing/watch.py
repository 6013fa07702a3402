"""Observing one block of a caller's code: from its first pass to the stored run."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvlens.engine.models import LoadedModel, shape_of
from kvlens.engine.rotary import rotary_of
from kvlens.observing.calls import attention_modules, check_attention
from kvlens.observing.changes import Changes, layer_changes
from kvlens.observing.hooking import Heard, hooked
from kvlens.observing.matching import Turn
from kvlens.observing.observer import Observer
from kvlens.observing.options import DEFAULTS, Options
from kvlens.observing.preparing import describe_caller
from kvlens.observing.refusals import refuse_empty, refuse_layers
from kvlens.observing.storing import Block, store_observed
from kvlens.observing.taken import chose_greedily
from kvlens.observing.written import Written
from kvlens.recording.sampling import OracleSampling, resolve
from kvlens.runs.request import Report


class Watch:
    """Follows the model from `open` to `close`."""

    def __init__(self, model: Any, tokenizer: Any, options: Options = DEFAULTS) -> None:
        """See kvlens.observe. Raises CannotObserve for a model that cannot be observed, Refusal for an `oracle` that it
        cannot have."""
        attention = check_attention(model)
        config = model.config.get_text_config()
        modules, layers = attention_modules(model), int(config.num_hidden_layers)
        if [int(module.layer_idx) for module in modules] != list(range(layers)):
            raise refuse_layers(type(model).__name__, len(modules), layers)
        shape, rotary = shape_of(config, torch.finfo(model.dtype).bits // 8), rotary_of(model)

        def sampling(tokens: int) -> OracleSampling | None:
            return resolve(options.oracle, shape.layers, shape.q_heads, tokens, options.shadow)

        sampling(1)  # refused before the block

        def turn(layer: int) -> Turn | None:
            return None if rotary is None else lambda keys, at: rotary(keys, at, layer, back=True)

        def changes(layer: int, tokens: int, written: Written) -> Changes | None:
            return layer_changes(layer, options.holds, options.drops, shape.kv_heads, tokens, written)

        self.observer = Observer(
            shape,
            options.row,
            options.shadow,
            turn,
            frozenset(layer for layer, window in enumerate(shape.windows) if window),
            sampling,
            changes,
            model.device,
        )
        self._block = Block(model, tokenizer, options, attention)
        self._heard, self._stack = Heard(), ExitStack()

    def open(self) -> None:
        """Begin to follow the model."""
        self._stack.enter_context(hooked(self._block.model, self.observer, self._heard))

    def leave(self) -> None:
        """Take the hooks off."""
        self._stack.close()

    def loaded(self) -> LoadedModel:
        """Return the caller's model as runs describe it."""
        return describe_caller(self._block.model, self._block.tokenizer, self._block.options.name)[0]

    def close(self, runs_dir: Path, error: str | None, report: Report) -> str:
        """Store what was observed -> the run's uid. error: why the block ended early. Raises CannotObserve where no
        step was observed."""
        observer, heard = self.observer, self._heard
        observer.finish(heard.sequence)
        if not observer.steps:
            raise refuse_empty()
        greedy = chose_greedily(observer.steps, observer.given_end)
        sampled = heard.sampled if heard.sampled is not None else False if greedy else None
        block = replace(self._block, presses=heard.presses, sampled=sampled)
        return store_observed(observer, block, runs_dir, error, report)
