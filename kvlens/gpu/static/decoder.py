"""Runs a prompt through a model under a method with the static step: prefill as always, then one call per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvlens.engine.engine import Engine, Options, entropies
from kvlens.engine.hf_attention import SessionCache
from kvlens.engine.models import LoadedModel
from kvlens.engine.prefill import ReadPrompt, prefill
from kvlens.engine.session import Session
from kvlens.gpu.static import cuda
from kvlens.gpu.static.session import StaticSession
from kvlens.memory.budget import Budget
from kvlens.methods.base import Method, StepEnd
from kvlens.prompts import Prompt


class StaticDecoder:
    """One generation. `step` takes the token to feed and returns the logits it produces; which token comes next is the
    caller's."""

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

        Raises BudgetInfeasible.
        """
        options = options or Options()
        self.loaded, self.prompt = loaded, prompt
        self.context = Engine(loaded).context(prompt, budget, options)
        self._ordinary = Session(method, params, self.context)
        self.steps = 0
        self._plain: Callable[[], torch.Tensor] = self._step
        self._run = self._plain
        self._captured = False
        self._warm = False
        """a step like those to come has been made, so everything that compiles, loads or allocates once has done so"""
        try:
            surprisal = self._prefill(options.prefill_chunk, read)
            last = self.context.prompt_tokens + self.context.max_new
            self.session = StaticSession(self._ordinary, loaded.model, last, ring, **session)
        except BaseException:
            self.close()
            raise
        self._token = torch.zeros(1, 1, dtype=torch.long, device=loaded.model.device)
        self._surprisal = float(surprisal[-1])
        self._text = prompt.pieces[-1]
        self._logprobs: torch.Tensor | None = None

    def _prefill(self, chunk: int, read: ReadPrompt | None) -> torch.Tensor:
        """Surprisal of every prompt token."""
        session = self._ordinary
        if read is None:
            surprisal = prefill(
                self.loaded, self.prompt, session, SessionCache(session, self.loaded.shape.layers), chunk
            )
        else:
            assert read.ids == self.prompt.ids
            session.adopt(read.keys, read.values, read.last_queries, read.peeked, read.received)
            surprisal = read.surprisal
        session.finish_prefill(surprisal[: self.context.prompt_tokens])
        return surprisal

    def _step(self) -> torch.Tensor:
        return self.session.step(self._token)

    # -----------------------------------------------------------------------------------------------------------------
    # decoding
    @torch.inference_mode()
    def step(self, token: int) -> torch.Tensor:
        """Feed `token` -> logits [V]. At step 0 it has to be the prompt's last token."""
        self.before(token)
        self._token.fill_(token)
        logits = self._run() if self.steps else self._step()
        self.after(logits)
        return logits

    def before(self, token: int) -> None:
        """The host's part before the step that is fed `token`."""
        assert self.steps < self.context.max_new, "all steps that were planned for have been made"
        assert self.steps or token == self.prompt.ids[-1], "step 0 feeds the prompt's last token"
        self.session.between_steps(self.steps, self._ended(token))

    def after(self, logits: torch.Tensor) -> None:
        """The host's part after a step, of which logits [V] came."""
        self.session.stepped()
        self._warm = self.steps > 0
        self.steps += 1
        self._logprobs = logits.float().log_softmax(-1)

    def _ended(self, token: int) -> StepEnd | None:
        """What the method may know of the step before, now that its successor's token is known."""
        if self._logprobs is None:
            return None
        entropy, varentropy = entropies(self._logprobs)
        step = self.steps - 1
        end = StepEnd(step, self.context.prompt_tokens + step, self._surprisal, entropy, varentropy, self._text)
        self._surprisal, self._text = -float(self._logprobs[token]), self.loaded.tokenizer.decode([token])
        return end

    def decode(self, steps: int, forced: tuple[int, ...] | None = None) -> list[int]:
        """`steps` steps from the start, each fed the likeliest token of the one before, or the `forced` one -> the
        tokens chosen."""
        token, ids = self.prompt.ids[-1], []
        for step in range(steps):
            logits = self.step(token)
            token = forced[step] if forced is not None else int(logits.argmax())
            ids.append(token)
        return ids

    # --------------------------------------------------------------------------------------------------------------
    # other drivers
    def compiled(self, backend: Any = "inductor") -> StaticDecoder:
        """From step 1 on the step is one graph of torch.compile, without a break and with fixed shapes. Step 0 is not
        like the others for every method (FreeKV has nothing to speculate on yet), so it runs as it is. There is no
        second stream in it: who holds the memory that the other one still reads is not the compiler's to see."""
        self.session.aside = cuda.InOrder()
        self._plain = self._run = torch.compile(self._step, fullgraph=True, dynamic=False, backend=backend)
        self._warm = False
        return self

    @torch.inference_mode()
    def capture(self) -> None:
        """Put the step, as it is or compiled, into a CUDA graph; `replay` runs it. A step after step 0, which is not
        like the others, must have been made the same way before. A second call captures anew. Raises RuntimeError on a
        CPU."""
        device = self.loaded.model.device
        assert device.type != "cuda" or self._warm, (
            "make a step like those to come before capturing; step 0 is another program"
        )
        run = cuda.capture(self._plain, device)
        self._run, self._captured = run, True

    def replay(self, token: int) -> torch.Tensor:
        """`step` through the captured graph; its logits are overwritten by the next replay. Raises RuntimeError without
        a capture."""
        if not self._captured:
            raise RuntimeError("nothing has been captured: call capture() first, on a CUDA device.")
        return self.step(token)

    @torch.inference_mode()
    def launch(self) -> torch.Tensor:
        """Issue the step as it is driven now, on the token fed last, without what lies between steps: for timing alone.
        The position moves on, the method is not told."""
        return self._run()

    def moved_bytes(self) -> torch.Tensor:
        """Payload brought to the device so far, int64 [2, L, H_kv]: before attentions that waited, and after them."""
        return self.session.recall.moved.clone().cpu()

    def close(self) -> None:
        """Give back the host memory. A captured step reads it, so there is none to be replayed any more."""
        self._run, self._captured = self._plain, False
        self._ordinary.close()
