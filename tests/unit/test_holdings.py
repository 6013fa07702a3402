"""What a method holds is found by its attributes, counted once per storage, and held to the budget."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from methodtrial import SHAPE, Trial

from kvlens import methods
from kvlens.budget import Budget
from kvlens.engine.border import WALKED_STEPS
from kvlens.engine.engine import Engine, Options
from kvlens.engine.holdings import COUNTER_BYTES, UNANNOUNCED
from kvlens.engine.models import LoadedModel, load
from kvlens.methods.faults import BUDGET, MethodFault
from kvlens.methods.full import FullKV
from kvlens.methods.run_inputs import Prefilled
from kvlens.methods.snapkv import SnapKV
from kvlens.text.prompts import PromptText, tokenize

N, NEW = 60, 4
KEYS = SHAPE.layers * SHAPE.kv_heads * N * SHAPE.head_dim * SHAPE.itemsize
"""bytes of the prompt's keys"""


@dataclass
class Box:
    content: Any


PLACES: dict[str, Callable[[torch.Tensor], Any]] = {
    "attribute": lambda keys: keys,
    "views": lambda keys: [keys[0], keys[1], keys.flatten()],
    "dict of lists": lambda keys: {"a": [(1, keys)]},
    "object": lambda keys: Box(Box(keys)),
    "closure": lambda keys: lambda: keys,
    "partial": lambda keys: functools.partial(print, keys),
    "deque": lambda keys: deque([keys]),
    "numpy": lambda keys: keys.numpy(),
    "copy in numpy": lambda keys: keys.numpy().copy()[1:],
}


def hiding(base: type, keep: Callable[[torch.Tensor], Any]) -> type:
    def prefill_end(self: Any, prompt: Prefilled) -> Any:
        self.hidden = keep(prompt.keys.clone())
        return base.prefill_end(self, prompt)

    return type("Hiding", (base,), {"name": "hiding", "title": "hiding", "prefill_end": prefill_end})


@pytest.mark.parametrize("place", PLACES)
def test_hidden_keys_are_counted_in_resident_bytes(place: str) -> None:
    plain, hiding_trial = Trial(FullKV, N, NEW), Trial(hiding(FullKV, PLACES[place]), N, NEW)
    account = hiding_trial.session.account
    assert account.by_name()[UNANNOUNCED] == KEYS
    assert account.resident == plain.session.account.resident + KEYS
    assert hiding_trial.session.border.holdings.bytes == KEYS


def test_hidden_keys_are_held_to_the_budget() -> None:
    half = SHAPE.full_kv_bytes(N + NEW) // 2
    Trial(hiding(SnapKV, lambda keys: None), N, NEW, budget=half, window=4, peek=False)
    with pytest.raises(MethodFault) as raised:
        Trial(hiding(SnapKV, lambda keys: keys), N, NEW, budget=half, window=4, peek=False)
    assert (raised.value.code, raised.value.hook) == (BUDGET, "held")


def test_what_is_hidden_while_decoding_is_found() -> None:
    class Late(FullKV):
        name = "late"

        def select(self, layer: int, q: torch.Tensor) -> None:
            self.queries = (*getattr(self, "queries", ()), q.clone())

    new = WALKED_STEPS + 2
    trial = Trial(Late, N, new)
    for step in range(new):
        trial.step(step)
    queries = SHAPE.q_heads * SHAPE.head_dim * SHAPE.itemsize
    assert trial.session.account.by_name()[UNANNOUNCED] == WALKED_STEPS * SHAPE.layers * queries


def test_tensors_of_the_class_are_counted() -> None:
    class Shared(FullKV):
        name = "shared"
        store: dict[str, torch.Tensor] = {}  # noqa: RUF012

        def prefill_end(self, prompt: Prefilled) -> Any:
            self.store["keys"] = prompt.keys.clone()
            return super().prefill_end(prompt)

    Shared.__module__ = "users_package"
    assert Trial(Shared, N, NEW).session.account.by_name()[UNANNOUNCED] == KEYS


def test_what_is_announced_or_the_runs_own_is_not_counted_twice() -> None:
    class Open(FullKV):
        name = "open"

        def prefill_end(self, prompt: Prefilled) -> Any:
            self.index = prompt.keys.clone()
            self.counter = torch.zeros(COUNTER_BYTES // 4)
            self.context_again = self.context
            return super().prefill_end(prompt)

        def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
            return {"index": (self.index[0],)}

    account = Trial(Open, N, NEW).session.account
    assert UNANNOUNCED not in account.by_name()
    assert account.by_name()["method:index"] == KEYS


@pytest.mark.parametrize("name", sorted(methods.BUILT_IN))
def test_methods_of_the_product_announce_what_they_hold(name: str, hidden: dict[str, int]) -> None:
    assert hidden[name] == 0


def test_keydiff_forgets_the_tables_with_which_it_read_the_prompt(demo: LoadedModel) -> None:
    """Only under a budget it reads the prompt block by block."""
    method = methods.get("keydiff")
    result = run(demo, method, method.Parameters(block=32), Budget.parse("50%"))
    assert result.unannounced_bytes == 0


@pytest.fixture(scope="module")
def demo() -> LoadedModel:
    return load("demo", "cpu")


def run(demo: LoadedModel, method: type[Any], params: Any, budget: Budget | None = None) -> Any:
    """Run a method on a short text."""
    prompt = tokenize(PromptText("The key of the door is 4821. " * 24), demo.tokenizer, demo.max_positions, 4)
    return Engine(demo).run(prompt, method, params, budget, Options(max_new=4))


@pytest.fixture(scope="module")
def hidden(demo: LoadedModel) -> dict[str, int]:
    """Bytes that each method holds unannounced after some steps on the demo model."""
    sizes = {}
    for name in methods.BUILT_IN:
        method = methods.get(name)
        sizes[name] = run(demo, method, method.Parameters(**method.untrained)).unannounced_bytes
    return sizes
