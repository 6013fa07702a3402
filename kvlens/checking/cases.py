"""The cases that a method is checked on: small models of several shapes, prompts below, at and above its windows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvlens.budget import Budget, BudgetInfeasible
from kvlens.checking.models import RecordList, random_llama, random_prompt
from kvlens.engine.engine import Engine, Options, Result
from kvlens.engine.models import LoadedModel, load
from kvlens.engine.prefill import ReadPrompt
from kvlens.methods.base import Method
from kvlens.methods.fitting import Sizes, choose
from kvlens.methods.full import FullKV
from kvlens.text.prompts import Prompt, PromptText, tokenize
from kvlens.text.segments import Segment

NEW = 20
"""decode steps of a case: one page of 16 tokens fills up on the way"""
SHARE = "50%"
"""budget of a case; a method that needs more gets the least it needs"""
HEAD_DIM = 32
SHAPES = ((6, 6), (6, 2), (8, 2))
"""query heads and KV heads: groups of 1, 3 and 4"""
LONGEST_WINDOW = 160
DEMO_TOKENS = 512


@dataclass(frozen=True)
class Model:
    """A model that cases run on."""

    name: str
    make: Callable[[], LoadedModel]

    @cached_property
    def engine(self) -> Engine:
        """Built when the first case of the model runs."""
        return Engine(self.make())


@dataclass(frozen=True)
class Case:
    """One method on one prompt of one model."""

    method: type[Method]
    model: Model
    prompt_tokens: int

    @cached_property
    def prompt(self) -> Prompt:
        """A random prompt with a full stop every few tokens, or a task of the demo model."""
        if self.model.name != "demo":
            return random_prompt(self.prompt_tokens, seed=self.prompt_tokens, vocabulary=256, stop=9)
        from kvlens.demo.encode import demo_encode
        from kvlens.demo.tasks import make_prompt

        loaded = self.model.engine.loaded
        task = make_prompt("multikey", self.prompt_tokens, 0.5, 0, demo_encode())
        halves = (
            Segment("first half", 0, len(task.text) // 2),
            Segment("second half", len(task.text) // 2, len(task.text)),
        )
        return tokenize(PromptText(task.text, segments=halves), loaded.tokenizer, loaded.max_positions, NEW)

    @cached_property
    def read(self) -> ReadPrompt:
        """The prompt, read once for the runs that share it."""
        needs = self.method.needs
        return self.model.engine.read(self.prompt, 0, max(128, needs.queries), needs.received)

    def params(self, budget: Budget | None) -> Any:
        """Return the parameters of a run as `kvlens run` chooses them: the paper's, or what the preset `fit` says."""
        context = self.model.engine.context(self.prompt, budget, Options(max_new=NEW))
        sizes = Sizes(context.shape, context.prompt_tokens, context.max_new, context.budget_bytes)
        usual = "demo" if self.model.name == "demo" and "demo" in self.method.presets else None
        return choose(self.method, None, usual, {} if usual else self.method.untrained, sizes).params

    @cached_property
    def held(self) -> Any:
        """The parameters at the case's budget."""
        return self.params(None if self.method.keeps_all else Budget.parse(SHARE))

    @cached_property
    def budget(self) -> Budget | None:
        """The case's budget: SHARE, or the smallest feasible one. None: the method keeps every token."""
        if self.method.keeps_all:
            return None
        budget = Budget.parse(SHARE)
        try:
            self.run(budget, steps=1)
        except BudgetInfeasible as refused:
            return Budget.parse(f"{refused.smallest}B")
        return budget

    def run(
        self,
        budget: Budget | None,
        sink: RecordList | None = None,
        chunk: int = 0,
        forced: tuple[int, ...] | None = None,
        read: ReadPrompt | None = None,
        params: Any = None,
        steps: int = NEW,
    ) -> Result:
        """Run the case. chunk: prompt tokens that the model reads at once; 0: all. params: None: `held`."""
        fed = (7,) * steps if steps < NEW else forced
        options = Options(max_new=NEW, planned=NEW, prefill_chunk=chunk, forced=fed, ignore_eos=True)
        values = self.held if params is None else params
        return self.model.engine.run(
            self.prompt, self.method, values, budget, options, sink, keep_logits=True, read=read
        )

    @cached_property
    def full(self) -> Result:
        """Full KV on the same prompt."""
        options = Options(max_new=NEW, prefill_chunk=0, ignore_eos=True)
        return self.model.engine.run(
            self.prompt, FullKV, FullKV.Parameters(), None, options, keep_logits=True, read=self.read
        )


def models() -> list[Model]:
    """Return the models, the smallest first."""

    def small(q_heads: int, kv_heads: int, dtype: torch.dtype) -> Callable[[], LoadedModel]:
        sizes = {
            "num_attention_heads": q_heads,
            "num_key_value_heads": kv_heads,
            "hidden_size": q_heads * HEAD_DIM,
            "num_hidden_layers": 2,
            "vocab_size": 256,
        }
        return lambda: random_llama(dtype=dtype, **sizes)

    random = [Model(f"random {q}/{kv} heads", small(q, kv, torch.float32)) for q, kv in SHAPES]
    return [
        *random,
        Model("random 8/2 heads bfloat16", small(8, 2, torch.bfloat16)),
        Model("demo", lambda: load("demo")),
    ]


def prompt_lengths(method: type[Method]) -> list[int]:
    """Return prompt lengths in tokens around the method's windows. A prompt of n tokens is read to its last token but
    one, so the lengths step by one."""
    fields: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(method.Parameters)}
    windows = [fields[name] for name in ("window", "recent", "sinks", "page") if isinstance(fields.get(name), int)]
    window = min(max([16, *windows]), LONGEST_WINDOW)
    return sorted({12, window - 1, window, window + 1, window + 2, 2 * window + 37})


def cases(method: type[Method]) -> Iterator[Case]:
    """Yield the cases, the smallest first."""
    *exact, narrow, demo = models()
    lengths = prompt_lengths(method)
    for tokens in lengths:
        for model in exact:
            yield Case(method, model, tokens)
    yield Case(method, narrow, lengths[-1])
    yield Case(method, demo, DEMO_TOKENS)
