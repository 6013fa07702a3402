"""Observing one block of a caller's code: from its first pass to the stored run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvlens.engine.models import LoadedModel, shape_of
from kvlens.engine.rotary import rotary_of
from kvlens.holds import Drop, Hold
from kvlens.observing.calls import attention_modules, check_attention
from kvlens.observing.changes import layer_changes
from kvlens.observing.hooking import Heard, hooked
from kvlens.observing.matching import Turn
from kvlens.observing.observer import Observer
from kvlens.observing.preparing import describe_caller
from kvlens.observing.refusals import CannotObserve, refuse_empty
from kvlens.observing.storing import Block, store_observed
from kvlens.observing.taken import chose_greedily
from kvlens.recording.sampling import resolve
from kvlens.runs.request import Report
from kvlens.store.reader import TraceReader


class Watch:
    """Follows the model from `open` to `close`."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        answer: str | None = None,
        needle: str | None = None,
        row: int = 0,
        shadow: bool = True,
        compare: bool = True,
        oracle: str = "auto",
        name: str | None = None,
        holds: Sequence[Hold] = (),
        drops: Sequence[Drop] = (),
        parent: TraceReader | None = None,
    ) -> None:
        """See kvlens.observe. Raises CannotObserve for a model that cannot be observed."""
        attention = check_attention(model)
        config = model.config.get_text_config()
        shape = shape_of(config, torch.finfo(model.dtype).bits // 8)
        rotary, modules = rotary_of(model), attention_modules(model)
        if [int(module.layer_idx) for module in modules] != list(range(shape.layers)):
            raise CannotObserve(
                "layers_without_attention",
                f"{type(model).__name__} has {len(modules)} attention layers of {shape.layers}: kvlens observes "
                "decoders whose layers all attend.",
                attention_layers=len(modules),
                layers=shape.layers,
            )
        self._holds, self._drops = tuple(holds), tuple(drops)

        def turn(layer: int) -> Turn | None:
            return None if rotary is None else lambda keys, at: rotary(keys, at, layer, back=True)

        self.observer = Observer(
            shape,
            row,
            shadow,
            turn,
            frozenset(layer for layer, window in enumerate(shape.windows) if window),
            lambda tokens: resolve(oracle, shape.layers, shape.q_heads, tokens, shadow),
            lambda layer, tokens, written: layer_changes(
                layer, self._holds, self._drops, shape.kv_heads, tokens, written
            ),
            model.device,
        )
        self._block = Block(
            model, tokenizer, name, answer, needle, compare, attention, self._holds, self._drops, parent
        )
        self._heard, self._stack = Heard(), ExitStack()

    def open(self) -> None:
        """Begin to follow the model."""
        self._stack.enter_context(hooked(self._block.model, self.observer, self._heard))

    def leave(self) -> None:
        """Take the hooks off."""
        self._stack.close()

    def loaded(self) -> LoadedModel:
        """Return the caller's model as runs describe it."""
        return describe_caller(self._block.model, self._block.tokenizer, self._block.name)[0]

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
