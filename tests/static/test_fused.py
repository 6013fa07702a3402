"""The step through fused kernels is the step through the modules of transformers: alone, in a batch, compiled, and with
fewer launches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from static_support import CASES, Counting, decoder, small_model
from support import random_llama, random_prompt
from test_compiled import on_random
from torch.utils._python_dispatch import TorchDispatchMode

from kvlens.kernels.compat import INTERPRET
from kvlens.lab.gpu.kernels import matvec, rotary_write
from kvlens.lab.gpu.static import BatchDecoder, llama

STEPS = 4
TRIED = [on_random(CASES[i]) for i in (0, 1, 2, 5, 8, 13)]
OPERATIONS = 9
"""of torch in a layer of FullKV: the five fused kernels, k1, and what lays its input and output out"""


class Operations(TorchDispatchMode):
    """Counts what would be launched: every operation that is no view."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(argument.alias_info and not argument.alias_info.is_write for argument in func._schema.returns):
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", TRIED, ids=lambda case: case.id)
def test_the_step_is_the_modules_step(case: Any) -> None:
    model, prompt = small_model(case), random_prompt(140 if case.method != "sekv" else 400)
    plain, fused = decoder(model, prompt, case, STEPS), decoder(model, prompt, case, STEPS).fused()
    try:
        token = prompt.ids[-1]
        for _ in range(STEPS):
            expected, found = plain.step(token), fused.step(token)
            assert torch.allclose(found, expected, atol=1e-4)
            token = int(expected.argmax())
        assert torch.equal(fused.moved_bytes(), plain.moved_bytes())
    finally:
        plain.close()
        fused.close()


def test_matrices_are_joined_once_and_held_once() -> None:
    """The modules' weights are views of what the fused step reads, and go on saying the same."""
    attention = random_llama(num_hidden_layers=1).model.model.layers[0].self_attn
    modules = [attention.q_proj, attention.k_proj, attention.v_proj]
    before = [module.weight.detach().clone() for module in modules]
    first = llama.joined(modules)
    assert torch.equal(first, torch.cat(before))
    assert llama.joined(modules).data_ptr() == first.data_ptr()
    for module, same in zip(modules, before, strict=True):
        assert torch.equal(module.weight, same)
        assert module.weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()


def test_a_model_of_another_kind_is_refused() -> None:
    class Other:
        config: Any = None

    assert llama.refusal(Other()) is not None
    with pytest.raises(ValueError, match="Llama"):
        llama.FusedLlama(Other())


@pytest.mark.skipif(not INTERPRET, reason="Triton's interpreter is off")
@pytest.mark.parametrize("case", [TRIED[0], TRIED[3]], ids=lambda case: case.id)
def test_a_layer_launches_less_than_its_modules(case: Any) -> None:
    counted: dict[tuple[bool, int], int] = {}
    for layers in (2, 3):
        model, prompt = random_llama(num_hidden_layers=layers, head_dim=16), random_prompt(140)
        for fused in (False, True):
            made = decoder(model, prompt, case, STEPS, kernels="triton")
            if fused:
                made.fused()
            made.step(prompt.ids[-1])
            with Operations() as seen, torch.inference_mode():
                made._step()
            counted[fused, layers] = seen.counts.total()
            made.close()
    modules, fewer = (counted[fused, 3] - counted[fused, 2] for fused in (False, True))
    assert modules - fewer >= 25
    if case.method == "full":
        assert fewer <= OPERATIONS


def test_the_fused_step_is_one_compiled_graph() -> None:
    torch._dynamo.reset()
    case, prompt, backend = TRIED[3], random_prompt(140), Counting()
    plain, compiled = (decoder(small_model(case), prompt, case, STEPS).fused() for _ in range(2))
    try:
        assert compiled.compiled(backend).decode(STEPS) == plain.decode(STEPS)
    finally:
        plain.close()
        compiled.close()
        torch._dynamo.reset()
    assert len(backend.graphs) == 1


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRET, reason="Triton's interpreter is off")
@pytest.mark.parametrize("case", [TRIED[0], TRIED[1], TRIED[2], TRIED[3]], ids=lambda case: case.id)
def test_sequences_together_are_what_they_are_alone(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kernels in the interpreter: one launch writes the tokens of both, and attends where nobody selects in the
    step."""
    model = random_llama(num_hidden_layers=2, head_dim=16)
    prompts = [random_prompt(140, seed) for seed in (0, 1)]
    alone = [decoder(model, prompt, case, STEPS) for prompt in prompts]
    expected = [one.decode(STEPS) for one in alone]
    monkeypatch.setattr(matvec, "backend", lambda tensor: "triton")
    monkeypatch.setattr(rotary_write, "backend", lambda tensor: "triton")
    batch = BatchDecoder([decoder(model, prompt, case, STEPS, kernels="triton") for prompt in prompts]).fused()
    try:
        assert batch.seam.together is not None
        assert batch.seam.together.attends == (case.method != "freekv")
        assert batch.decode(STEPS) == expected
    finally:
        batch.close()
        for one in alone:
            one.close()
