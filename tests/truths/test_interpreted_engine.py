"""Sessions that attend through k1: the kernel runs in Triton's interpreter, everything else as always, for every
method.

The interpreter shows indexing and algebra; it shows neither the arithmetic of a device nor its races (kernels.md).
"""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from support import ListSink, makes, preset_of, random_llama, random_prompt, run, share_of

from kvlens import methods
from kvlens.holds import Drop, Hold
from kvlens.kernels import attend, pool_attend

NAMES = makes()
NEW = 3
RECALLING = (
    "sekv",
    "freekv",
    "sentkv",
    "infinigen",
    "arkvale",
    "infllm",
    "sentencekv",
    "shadowkv",
    "clusterkv",
    "retroinfer",
    "pqcache",
)

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="gives kernels CPU tensors: the interpreter's"
)


def moved(sink: ListSink) -> list[tuple[Any, ...]]:
    return [(t.step, t.layer, t.kv_head, t.span, t.bytes) for record in sink.steps for t in record.transfers]


@pytest.fixture(scope="module")
def tiny() -> Any:
    """Heads of 16, the narrowest that k1 takes; two layers: the first may be dense, the second is looked ahead to."""
    return random_llama(head_dim=16, num_hidden_layers=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_run_through_k1_is_the_run_through_pytorch(tiny: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, prompt = methods.get(name), random_prompt(140)
    overrides = dict(chosen.untrained)  # what the demo preset names was trained for the demo model only
    if getattr(methods.make_parameters(chosen, preset_of(name), overrides), "dense_layers", 0) > 1:
        overrides["dense_layers"] = 1  # of two
    if "select_layer" in {field.name for field in fields(chosen.Parameters)}:
        overrides |= {"select_layer": 0, "reselect_layer": 0}  # the layer that chooses is followed by one that reads
    settings = {
        "budget": share_of(name, "0.8"),
        "preset": preset_of(name),
        "overrides": overrides,
        "max_new": NEW,
        "keep_logits": True,
        "ignore_eos": True,
    }
    plain, interpreted = ListSink(), ListSink()
    biased: list[bool] = []
    runs_on = attend.runs_on
    with monkeypatch.context() as watching:
        watching.setattr(attend, "runs_on", lambda q, **given: biased.append(True) or runs_on(q, **given))
        first = run(tiny, prompt, name, sink=plain, **settings)
    calls = []

    def counted(*arguments: Any) -> torch.Tensor:
        calls.append(arguments[1].shape)
        return kernel(*arguments)

    kernel = pool_attend.pool_attention
    monkeypatch.setattr(attend, "backend", lambda tensor: "triton")
    monkeypatch.setattr(pool_attend, "pool_attention", counted)
    with np.errstate(divide="ignore"):  # the interpreter is NumPy, and log2(0) = -inf is meant
        second = run(tiny, prompt, name, sink=interpreted, **settings)
    assert first.ids == second.ids
    for a, b in zip(first.logits, second.logits, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)
    assert moved(plain) == moved(interpreted)
    assert any(step >= 0 for step, *_ in moved(plain)) == (name in RECALLING)
    for one, other in zip(plain.steps, interpreted.steps, strict=True):
        for column in one.head:
            np.testing.assert_allclose(one.head[column], other.head[column], atol=1e-3, err_msg=column)
    # without a bias the call is the stock model's; who selects or sums up has one, and who leaves a slot empty
    summed_up = any(record.head["mass_coarse"].any() for record in plain.steps)
    # a bag is attended whole, so a `select` in that family returns None
    selects = chosen.select is not methods.Method.select and chosen.family != "decode_eviction"
    assert bool(calls) == any(biased)
    assert bool(calls) >= (selects or summed_up)
    assert first.kernels == "torch"
    assert second.kernels in (("triton", "torch+triton") if calls else ("torch",))


@pytest.mark.slow
def test_what_is_held_is_attended_through_k1_and_what_is_dropped_is_not(
    tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 0 attends by the kernel's tables. From step 1 on a layer holds a range and two drop another, which
    changes the bias after it has been made."""
    prompt = random_prompt(320)
    settings = {"budget": "0.5", "preset": "demo", "max_new": 3, "keep_logits": True, "ignore_eos": True}
    plain = run(tiny, prompt, "freekv", **settings)
    settings["holds"] = (Hold(1, 90, 170, ((1, 0), (1, 1)), 1),)
    settings["drops"] = (Drop(2, 250, 310, ((0, 1), (1, 1)), 1),)
    held = run(tiny, prompt, "freekv", **settings)
    monkeypatch.setattr(attend, "backend", lambda tensor: "triton")
    with np.errstate(divide="ignore"):
        interpreted = run(tiny, prompt, "freekv", **settings)
    assert (held.kernels, interpreted.kernels) == ("torch", "triton")
    assert held.ids == interpreted.ids
    for a, b in zip(held.logits, interpreted.logits, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)
    assert (held.logits[1] - plain.logits[1]).abs().max() > 1e-3, "the hold shows"
