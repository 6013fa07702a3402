"""Reading the prompt: chunked, exact, with what its tokens' surprisals are computed from; and a prompt once read, for
runs that share it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch

from kvlens.engine.hf_attention import SessionCache
from kvlens.engine.inputs import Gathering
from kvlens.engine.models import LoadedModel
from kvlens.engine.session import Session
from kvlens.engine.sharedpasses import SharedPasses
from kvlens.engine.surprisal import Surprisals
from kvlens.methods.base import Method
from kvlens.methods.needs import SecondReading
from kvlens.methods.run_inputs import Peeked
from kvlens.text.prompts import Prompt


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt after prefill, before any method has placed it. Shapes as in kvlens.methods.run_inputs.Prefilled."""

    ids: tuple[int, ...]
    keys: torch.Tensor
    values: torch.Tensor
    last_queries: torch.Tensor
    """[L, Hq, w, D], of the last w positions"""
    peeked: Peeked
    """of the token after them, the prompt's last"""
    surprisal: Surprisals
    """of its tokens; whichever of its runs asks first computes them"""
    received: torch.Tensor | None = None
    """float32 [L, Hq, n]; None: it was not asked for"""
    ahead_ns: int = 0
    """spent on the reading before the run began that counts it as its prefill"""
    repeats: dict[SecondReading, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict)
    """what second readings of it received (kvlens/engine/second_reading.py), for runs that are not recorded"""
    passes: SharedPasses | None = None
    """of full KV beside the lanes of a race that share this reading; None: there is one run"""

    def for_turns(self) -> ReadPrompt:
        """Return the reading for runs that decode in turns: they share full KV's passes beside them."""
        return replace(self, passes=SharedPasses())

    def serves(self, method: type[Method]) -> bool:
        """Whether all that `method` asks to see was kept."""
        queries = self.last_queries.shape[2] >= min(method.needs.queries, self.keys.shape[2])
        return queries and (self.received is not None or not method.needs.received)


Reader = Callable[[], ReadPrompt]
"""reads a run's prompt when the run comes to it, or has it from somewhere"""


def prefill(
    loaded: LoadedModel,
    prompt: Prompt,
    session: Session,
    cache: SessionCache,
    chunk: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    check: Callable[[], None] = lambda: None,
    every: bool = True,
) -> Surprisals:
    """Put the prompt without its last token through the model, `chunk` tokens at a time (0: at once), or as many as a
    method that reads block by block says -> its surprisals; every=False: nobody will ask for more than the last
    token's. Where the session needs a peek, the last token follows without being stored; no logits are made of it.

    `check` is called before every chunk and may raise.
    """
    device = loaded.model.device
    ids = torch.tensor([prompt.ids], device=device)
    n = ids.shape[1] - 1
    surprisal = Surprisals(loaded, prompt.ids, every)
    size = session.border.block or chunk or n
    gathering = None
    if session.needs.inputs:
        gathering = Gathering(loaded.model, session.shape.layers, session.method.name)
    with gathering or nullcontext():
        for start in range(0, n, size):
            check()
            part = ids[:, start : min(start + size, n)]
            end = start + part.shape[1]
            if loaded.plain_head:
                out = loaded.model.base_model(input_ids=part, past_key_values=cache, use_cache=True)
                surprisal.wait(out.last_hidden_state[0])
            else:
                logit_rows = part.shape[1] if every else 1
                out = loaded.model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=logit_rows)
                targets = ids[0, end + 1 - logit_rows : end + 1]
                surprisal.tell(torch.nn.functional.cross_entropy(out.logits[0].float(), targets, reduction="none"))
            progress(end, n)
    if gathering is not None:
        session.observed.inputs(gathering.gathered())
    if session.needs.peek:
        check()
        with session.observed.peek():
            loaded.model.base_model(input_ids=ids[:, n:], past_key_values=cache, use_cache=True)
    return surprisal
