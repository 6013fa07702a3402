"""Runs a prompt through a model under a method with the static step: prefill as always, then one call per token."""

from __future__ import annotations

from typing import Any

import torch

from kvlens.engine.engine import Engine, Options
from kvlens.engine.loop import Generation
from kvlens.engine.models import LoadedModel
from kvlens.engine.prefill import ReadPrompt
from kvlens.engine.session import Session
from kvlens.lab.gpu.static.driver import Driver
from kvlens.lab.gpu.static.refusal import StaticRefused
from kvlens.lab.gpu.static.session import StaticSession
from kvlens.memory.budget import Budget
from kvlens.methods.base import Method
from kvlens.text.prompts import Prompt


class StaticDecoder(Driver):
    """One generation. `step` takes the token to feed and returns the logits it produces, so that the caller says which
    token comes next; `decode` leaves that to the engine's loop."""

    @torch.inference_mode()
    def __init__(
        self,
        loaded: LoadedModel,
        prompt: Prompt,
        method: type[Method],
        params: Any,
        budget: Budget | None = None,
        options: Options | None = None,
        ring: int = 0,
        read: ReadPrompt | None = None,
        **session: Any,
    ) -> None:
        """Prefills. ring: steps that the rings of instruments hold, 0: no instruments; read: this very prompt, read
        before; session: what else StaticSession takes (record, host, kernels).

        Raises BudgetInfeasible, and StaticRefused for a method that is not `static_ready` or lays the KV heads of a
        layer out differently.
        """
        if not method.static_ready:
            raise StaticRefused(method.title, "not_static_ready")
        assert read is None or read.ids == prompt.ids
        options = options or Options()
        self.loaded, self.prompt = loaded, prompt
        self.context = Engine(loaded).context(prompt, budget, options)
        if self.context.forms:
            raise ValueError(
                f"'{loaded.name}' has sliding windows, capped scores or sink logits, which no static step has."
            )
        generation = Generation(loaded, prompt, Session(method, params, self.context), options)
        try:
            generation.place(read)
            memory = generation.session.memory
            if memory.distance is not None:
                raise StaticRefused(method.title, "shifted_keys")
            if memory.layout.shared:
                raise StaticRefused(method.title, "shared_zones")
            if memory.layout.whole:
                raise StaticRefused(method.title, "unequal_heads")
            self.session = StaticSession(generation.session, loaded.model, ring, **session)
        except BaseException:
            generation.session.close()
            raise
        super().__init__(loaded.model, [generation], [self.session])

    def _step(self) -> torch.Tensor:
        session = self.session
        session.begin()
        logits = self._forward(session.position[None], session, session.cache)
        session.end()
        return logits

    def step(self, token: int) -> torch.Tensor:
        """Feed `token` -> logits [V]. At step 0 it has to be the prompt's last token."""
        return self.feed([token])[0]

    def replay(self, token: int) -> torch.Tensor:
        """`step` through the captured graph. Raises RuntimeError without a capture."""
        return self.replayed([token])[0]

    def decode(self, steps: int, forced: tuple[int, ...] | None = None) -> list[int]:
        """`steps` steps from the start -> the tokens chosen."""
        return self.run(steps, forced)[0]

    def moved_bytes(self) -> torch.Tensor:
        """Payload brought to the device so far, int64 [2, L, H_kv]: before attentions that waited, and after them."""
        return self.moved()[0]
