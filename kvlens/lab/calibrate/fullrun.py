"""Full attention, step by step, for those who want to look on: greedy decoding under FullKV with an observer of every
layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvlens.engine.engine import Engine, Options
from kvlens.engine.hf_attention import SessionCache
from kvlens.engine.prefill import ReadPrompt
from kvlens.engine.session import Session
from kvlens.methods.full import FullKV
from kvlens.text.prompts import Prompt
from kvlens.tiers.slots import Slots


class Watcher(Protocol):
    """Sees every layer of every decode step. L layers, Hq query heads, C tokens so far; key and value j are of position
    j."""

    def layer(self, layer: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> None:
        """q [Hq, D], keys and values [H_kv, C, D]: views, to be read at once."""

    def token(self, token: int) -> None:
        """The token that came out of the step."""


class _Observer:
    """Hands the session's layers on with the keys and values they attended."""

    def __init__(self, session: Session, watcher: Watcher) -> None:
        self.session, self.watcher = session, watcher

    def layer(
        self, layer: int, q: torch.Tensor, biases: object, scaling: float, selection: object, slots: Sequence[Slots]
    ) -> None:
        self.watcher.layer(layer, q, slots[0].keys, slots[0].values, scaling)


@torch.inference_mode()
def watch(
    engine: Engine, prompt: Prompt, read: ReadPrompt, max_new: int, watcher: Watcher, stop: Callable[[list[int]], bool]
) -> list[int]:
    """Token ids of the answer to a prompt that `engine.read` has read: until end of text, `stop` says so, or `max_new`
    tokens."""
    loaded, context = engine.loaded, engine.context(prompt, None, Options(max_new=max_new))
    if context.forms:
        raise ValueError(
            f"'{loaded.name}' has sliding windows, capped scores or sink logits, for which nothing is calibrated: "
            "run a method that needs no calibration."
        )
    session = Session(FullKV, FullKV.Parameters(), context)
    cache = SessionCache(session, loaded.shape.layers)
    try:
        session.observed.adopt(read.keys, read.values, read.last_queries, read.peeked, read.received)
        session.finish_prefill(None)
        session.observer = _Observer(session, watcher)
        ids = [prompt.ids[-1]]
        for step in range(max_new):
            session.begin_step(step, None)
            session.method.drain_journal()
            fed = torch.tensor([[ids[-1]]], device=loaded.model.device)
            logits = loaded.model(input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1]
            ids.append(int(logits.argmax()))
            watcher.token(ids[-1])
            if ids[-1] in loaded.eos or stop(ids[1:]):
                break
        return ids[1:]
    finally:
        session.close()
