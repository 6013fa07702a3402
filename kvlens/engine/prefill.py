"""Reading the prompt: chunked, exact; the surprisals of its tokens, computed without sequence x vocabulary logits when
somebody asks for them; and a prompt once read, for runs that share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from kvlens.engine.hf_attention import SessionCache
from kvlens.engine.inputs import Gathering
from kvlens.engine.models import LoadedModel
from kvlens.engine.session import Session
from kvlens.engine.sharedpasses import SharedPasses
from kvlens.methods.base import Method
from kvlens.methods.hooks import SecondReading
from kvlens.methods.run_inputs import Peeked
from kvlens.text.prompts import Prompt

ROWS = 256
"""positions whose logits exist at a time"""
WAITING_BYTES = 64 * 2**20
"""of hidden states that wait at most; what is beyond them is computed while the prompt is read"""


class Surprisals:
    """-log p of each prompt token given all before it, in nats.

    The output layer over a whole prompt costs a fourth of the prefill of a small model with a large vocabulary, and few
    methods place a prompt by it. So the prompt's hidden states wait here, on the model's device and in its number
    format, until a caller needs their surprisals. The last token's surprisal, which step 0 is told, is always computed
    alone: it is the same number whoever needs the others, and however many wait. Only a model that says logits as a
    whole (`tell`) computes it beside others, where these are needed too.

    Threads may share one, as long as only one works at a time: a turn may be handed on inside `progress`.
    """

    def __init__(self, loaded: LoadedModel | None, ids: Sequence[int], every: bool = True) -> None:
        """loaded: None: all are known; ids: of the prompt's tokens; every: False: nobody will ask for more than the
        last token's."""
        self._loaded, self._every = loaded, every
        self._targets = torch.tensor(ids[1:], device=None if loaded is None else loaded.model.device)
        self._waiting: list[torch.Tensor] = []
        """hidden states [m, d], of the first tokens"""
        self._came: list[torch.Tensor] = []
        """surprisals [m], of the first of those that wait, as far as somebody who asked has come"""
        self._told: list[torch.Tensor] = []
        """surprisals [m], of the tokens after all that wait"""
        self._end: torch.Tensor | None = None
        """hidden state [1, d] of the last token that was waited for"""
        self._last: float | None = None
        self.known: torch.Tensor | None = None
        """float32 [tokens], NaN at position 0, which nothing predicts, and wherever `every` was False; None: nobody has
        asked yet"""

    @classmethod
    def wrap(cls, nats: torch.Tensor) -> Surprisals:
        """That are known: float32 [tokens]."""
        surprisals = cls(None, ())
        surprisals._last, surprisals.known = float(nats[-1]), nats
        return surprisals

    @classmethod
    def restored(cls, loaded: LoadedModel, ids: Sequence[int], tensors: Mapping[str, torch.Tensor]) -> Surprisals:
        """From what `state` gave. Raises KeyError where that is not in `tensors`."""
        if "surprisal" in tensors:
            return cls.wrap(tensors["surprisal"])
        surprisals = cls(loaded, ids)
        surprisals._waiting, surprisals._end = [tensors["hidden"]], tensors["hidden"][-1:]
        return surprisals

    def state(self) -> dict[str, torch.Tensor]:
        """What they can be had from again: {"surprisal": as `known`} or {"hidden": [tokens - 1, d]}."""
        if self.known is None and not self._told:
            return {"hidden": torch.cat(self._waiting)}
        return {"surprisal": self.whole()}

    def wait(self, hidden: torch.Tensor) -> None:
        """The next tokens have gone through a model whose logits are its output layer's, nothing after it: hidden
        [m, d] after the final norm."""
        held = sum(part.nbytes for part in self._waiting)
        self._end = hidden[-1:].clone()
        if not self._every:
            return
        if not self._told and held + hidden.nbytes <= WAITING_BYTES:
            self._waiting.append(hidden)
        else:
            start = sum(map(len, (*self._waiting, *self._told)))
            self._told += self._computed(hidden, self._targets[start : start + len(hidden)])

    def tell(self, nats: torch.Tensor) -> None:
        """The next tokens', of a model that says logits only as a whole: float32 [m]; of the last token alone where no
        more are wanted."""
        self._told = [*self._told, nats] if self._every else [nats[-1:]]

    @property
    def last(self) -> float:
        """The last token's."""
        if self._last is None:
            alone = self._told if self._end is None else list(self._computed(self._end, self._targets[-1:]))
            self._last = float(alone[-1][-1])
        return self._last

    def whole(self, progress: Callable[[int, int], None] = lambda finished, total: None) -> torch.Tensor:
        """All of them, as `known`; computed once, by whoever asks. progress(done, total): before every few rows; what
        it raises, and who comes to ask meanwhile, leaves the rest to the next."""
        waiting = sum(map(len, self._waiting))
        while self.known is None:
            if waiting:
                progress(sum(map(len, self._came)), waiting)
            self._go_on()
        return self.known

    @torch.inference_mode()
    def _go_on(self) -> None:
        """The next few rows, where somebody else has not come to the end meanwhile; with the last all are known."""
        if self.known is not None:
            return
        row, waiting = sum(map(len, self._came)), sum(map(len, self._waiting))
        known_end = len(self._targets) - sum(map(len, self._told))
        if row < waiting:
            if len(self._waiting) > 1:
                self._waiting = [torch.cat(self._waiting)]
            rows, start = self._waiting[0][row : row + ROWS], known_end - waiting + row
            self._came += self._computed(rows, self._targets[start : start + len(rows)])
            row += len(rows)
        if row < waiting:
            return
        nats = torch.full((len(self._targets) + 1,), torch.nan, device=self._targets.device)
        if self._came or self._told:
            nats[known_end - waiting + 1 :] = torch.cat([*self._came, *self._told])
        nats[-1] = self.last
        self.known, self._waiting, self._came, self._told = nats, [], [], []

    def _computed(self, hidden: torch.Tensor, targets: torch.Tensor) -> Iterator[torch.Tensor]:
        """Surprisals of targets [m] after hidden [m, d], ROWS at a time."""
        assert self._loaded is not None
        head = self._loaded.model.get_output_embeddings()
        for rows, part_targets in zip(hidden.split(ROWS), targets.split(ROWS), strict=True):
            yield F.cross_entropy(head(rows).float(), part_targets, reduction="none")


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
    progress: Callable[[int, int], None] = lambda finished, total: None,
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
