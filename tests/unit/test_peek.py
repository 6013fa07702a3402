"""Peeking: the last prompt token's query, key and value under full attention, seen before step 0 feeds it, and nothing
else changed."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from support import ListSink, random_llama, random_prompt

from kvlens.engine.engine import Engine, Options
from kvlens.lab.calibrate.fullrun import watch
from kvlens.methods.full import FullKV
from kvlens.methods.hooks import Needs
from kvlens.methods.run_inputs import Peeked, Prefilled
from kvlens.text.prompts import Prompt


class Peeking(FullKV):
    """FullKV that looks."""

    name = "peeking"
    needs = Needs(peek=True)
    seen: ClassVar[list[Peeked]] = []

    def prefill_end(self, prompt: Prefilled) -> Any:
        assert prompt.peeked is not None
        assert prompt.keys.shape[2] == self.context.prompt_tokens, "the last prompt token was stored"
        self.seen.append(prompt.peeked)
        return super().prefill_end(prompt)


class NotPeeking(FullKV):
    name = "not_peeking"
    seen: ClassVar[list[Peeked | None]] = []

    def prefill_end(self, prompt: Prefilled) -> Any:
        self.seen.append(prompt.peeked)
        return super().prefill_end(prompt)


class FirstStep:
    """A watcher of `kvlens.lab.calibrate.fullrun.watch`: query, key and value of the token that step 0 feeds, by
    layer."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, ...]] = []

    def layer(self, layer: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float) -> None:
        self.seen.append((q[:, None].clone(), keys[:, -1:].clone(), values[:, -1:].clone()))

    def token(self, token: int) -> None:
        pass


def go(model: Any, prompt: Prompt, method: type[FullKV] = Peeking, **more: Any) -> Any:
    options = Options(max_new=6, ignore_eos=True, prefill_chunk=more.pop("chunk", 512))
    return Engine(model).run(prompt, method, method.Parameters(), None, options, keep_logits=True, **more)


@pytest.mark.parametrize("n", [2, 3, 90, 700])
def test_what_is_peeked_is_what_step_0_sees_bit_for_bit(n: int) -> None:
    model, prompt = random_llama(seed=1), random_prompt(n, seed=2)
    engine, first = Engine(model), FirstStep()
    read = engine.read(prompt)
    watch(engine, prompt, read, 1, first, lambda ids: False)
    go(model, prompt)
    for peeked in (read.peeked, Peeking.seen[-1]):
        for ours, theirs in zip(
            (peeked.queries, peeked.keys, peeked.values), zip(*first.seen, strict=True), strict=True
        ):
            assert torch.equal(ours, torch.stack(theirs))


def test_peeking_changes_no_logits_no_surprisal_and_no_bytes_of_decoding() -> None:
    model, prompt = random_llama(seed=1), random_prompt(300, seed=4)
    plain, recorded = go(model, prompt, NotPeeking, sink=ListSink()), go(model, prompt, sink=ListSink())
    assert NotPeeking.seen == [None]
    assert torch.equal(recorded.surprisal.whole()[1:], plain.surprisal.whole()[1:])
    for other in (go(model, prompt), recorded):
        assert other.ids == plain.ids
        assert all(torch.equal(a, b) for a, b in zip(other.logits, plain.logits, strict=True))
        held = other.unannounced_bytes  # by the test's method, which keeps what it peeked
        assert other.peak_bytes - held == plain.peak_bytes - plain.unannounced_bytes


def test_chunked_and_shared_prefill_peek_the_same() -> None:
    model, prompt = random_llama(seed=1), random_prompt(300, seed=5)
    whole = go(model, prompt, chunk=0)
    read = Engine(model).read(prompt)
    shared, alone, chunked = go(model, prompt, read=read), go(model, prompt), go(model, prompt, chunk=37)
    assert shared.ids == alone.ids == chunked.ids == whole.ids
    assert all(torch.equal(a, b) for a, b in zip(shared.logits, alone.logits, strict=True))
    first, by_adoption, by_itself, by_chunks = Peeking.seen[-4:]
    assert torch.equal(by_adoption.queries, by_itself.queries)
    assert torch.equal(by_adoption.keys, by_itself.keys)
    torch.testing.assert_close(by_chunks.queries, first.queries, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(by_chunks.values, first.values, atol=1e-4, rtol=1e-4)
