"""Reading the prompt: chunked, exact, with each token's surprisal; and a prompt once read, for runs that share it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from kvlens.engine.hf_attention import SessionCache
from kvlens.engine.inputs import Gathering
from kvlens.engine.models import LoadedModel
from kvlens.engine.session import Session
from kvlens.engine.surprisal import chunk_surprisal
from kvlens.methods.base import Method
from kvlens.methods.given import Peeked
from kvlens.text.prompts import Prompt


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt after prefill, before any method has placed it. Shapes as in kvlens.methods.given.Prefilled."""

    ids: tuple[int, ...]
    keys: torch.Tensor
    values: torch.Tensor
    last_queries: torch.Tensor
    """[L, Hq, w, D], of the last w positions"""
    peeked: Peeked
    """of the token after them, the prompt's last"""
    surprisal: torch.Tensor
    """float32 [tokens of the prompt], nats, NaN at position 0"""
    received: torch.Tensor | None = None
    """float32 [L, Hq, n]; None: it was not asked for"""

    def serves(self, method: type[Method]) -> bool:
        """Whether all that `method` asks to see was kept."""
        queries = self.last_queries.shape[2] >= min(method.observed_queries, self.keys.shape[2])
        return queries and (self.received is not None or not method.needs_received)


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
) -> torch.Tensor:
    """Put the prompt without its last token through the model, `chunk` tokens at a time (0: at once), or as many as a
    method that reads block by block says -> surprisal of every token; every=False: of the last alone, which step 0 is
    told, since all of them cost a fourth of the prefill of a small model with a large vocabulary. Where the session
    peeks, the last token follows without being stored; no logits are made of it.

    `check` is called before every chunk and may raise.
    """
    device = loaded.model.device
    ids = torch.tensor([prompt.ids], device=device)
    n = ids.shape[1] - 1
    parts = [torch.full((1,), torch.nan, device=device)]
    size = session.method.block or chunk or n
    gathering = None
    if session.method.needs_inputs:
        gathering = Gathering(loaded.model, session.shape.layers, session.method.name)
    with gathering or nullcontext():
        for first in range(0, n, size):
            check()
            part = ids[:, first : min(first + size, n)]
            after = first + part.shape[1]
            wanted = part.shape[1] if every else int(after == n)
            targets = ids[0, after + 1 - wanted : after + 1]
            parts.append(torch.full((part.shape[1] - wanted,), torch.nan, device=device))
            if loaded.plain_head:
                hidden = loaded.model.base_model(
                    input_ids=part, past_key_values=cache, use_cache=True
                ).last_hidden_state
                parts.append(chunk_surprisal(loaded, hidden[0, part.shape[1] - wanted :], targets))
            else:
                logits = loaded.model(input_ids=part, past_key_values=cache, use_cache=True).logits
                last = logits[0, part.shape[1] - wanted :].float()
                parts.append(torch.nn.functional.cross_entropy(last, targets, reduction="none"))
            progress(after, n)
    if gathering is not None:
        session.observed.inputs(gathering.gathered())
    if session.peeks:
        check()
        with session.observed.peek():
            loaded.model.base_model(input_ids=ids[:, n:], past_key_values=cache, use_cache=True)
    return torch.cat(parts)
