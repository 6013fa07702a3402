"""The kernels of the fused step against float64, and the step itself against the modules of transformers, on the
device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvlens import methods
from kvlens.lab.gpu import decode
from kvlens.lab.gpu.failures import sentence
from kvlens.lab.gpu.kernel_checks import DIM, GROUP, HEADS, KINDS, Kind, near
from kvlens.lab.gpu.kernels.matvec import Around, matvec, matvec_torch
from kvlens.lab.gpu.kernels.rotary_write import Places, rotary_write, rotary_write_torch
from kvlens.lab.gpu.part import Bench, Part
from kvlens.lab.gpu.recording import busiest
from kvlens.lab.gpu.settings import settings
from kvlens.lab.results.gpu import CheckRow
from kvlens.methods.base import Method

if TYPE_CHECKING:
    from kvlens.engine.models import LoadedModel

AROUNDS = ((False, False, False), (False, False, True), (True, True, False))
"""with a norm, gated, with a residual"""
STEP_TOLERANCE = {"bf16": 3e-2, "fp16": 4e-3, "fp32": 2e-5}
"""of the logits of a two-layer model, which both ways round in different places"""
STEPS = 3
BUDGET = "0.4"
"""of full KV, for methods that do not keep everything"""


@torch.inference_mode()
def measure(bench: Bench) -> Iterator[CheckRow]:
    """A check that cannot be run is a failed check, and the others go on."""
    torch.manual_seed(0)
    checks: list[tuple[str, Callable[[], Iterator[CheckRow]]]] = []
    for kind in KINDS:
        checks.append((f"mat-vec, {kind.name}", partial(_matvecs, bench, kind)))
        checks.append((f"rotary, {kind.name}", partial(_rotary, bench, kind)))
    checks += [(f"step, {kind.name}", partial(_steps, bench, kind)) for kind in KINDS[::2]]
    for name, check in checks:
        try:
            yield from check()
        except Exception as problem:
            if not bench.device.alive():
                raise
            yield CheckRow(f"{name}: {sentence(problem, 'free memory of the device')[0]}", -1.0, 0.0, False)


def _wide(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.double().cpu()


def _matvecs(bench: Bench, kind: Kind) -> Iterator[CheckRow]:
    """Each product follows one whose result it reads."""
    size = (96, 96) if bench.dry else (2048, 2048)
    for vectors in (1, 8):
        for norm, gated, add in AROUNDS:
            normal = partial(bench.device.normal, dtype=kind.dtype)
            inner_matrix = normal(size[1], size[0], scale=size[0] ** -0.5)
            matrix = normal(size[0] * (2 if gated else 1), size[1], scale=size[1] ** -0.5)
            x, weight, extra = normal(vectors, size[0]), normal(size[1]), normal(vectors, size[0])
            around = Around(weight if norm else None, 1e-5, gated, extra if add else None)
            out = matvec(matvec(x, inner_matrix), matrix, around)
            wide = Around(_wide(around.norm), around.epsilon, gated, _wide(around.add))
            inner = matvec_torch(x.double().cpu(), inner_matrix.double().cpu())
            exact = matvec_torch(inner, matrix.double().cpu(), wide)
            parts = [name for name, is_used in (("norm", norm), ("gate", gated), ("residual", add)) if is_used]
            name = f"mat-vec, {kind.name}, {vectors} vectors{''.join(f', {part}' for part in parts)}"
            yield near(name, out, exact, 2 * kind.tolerance)


def _rotary(bench: Bench, kind: Kind) -> Iterator[CheckRow]:
    queries, slots = HEADS * GROUP, 50
    normal = partial(bench.device.normal, dtype=kind.dtype)
    qkv = normal(1, (queries + 2 * HEADS) * DIM)
    angle = bench.device.normal(1, DIM // 2, dtype=torch.float32).repeat(1, 2)
    cos, sin = angle.cos().to(kind.dtype), angle.sin().to(kind.dtype)
    keys, values = (torch.zeros(HEADS, slots, DIM, dtype=kind.dtype, device=bench.device.at) for _ in range(2))
    slot = torch.arange(HEADS, device=bench.device.at) * 3
    q = rotary_write(qkv, cos, sin, keys, values, slot)
    sides = [torch.zeros(HEADS, slots, DIM, dtype=torch.float64) for _ in range(2)]
    turned = [x.double().cpu() for x in (qkv, cos, sin)]
    exact = rotary_write_torch(turned[0], turned[1], turned[2], Places(sides[0], sides[1], slot.cpu()[None]))
    for name, result, expected in (("queries", q, exact), ("keys", keys, sides[0]), ("values", values, sides[1])):
        yield near(f"rotary embedding and write, {kind.name}: {name}", result, expected, kind.tolerance)


def _steps(bench: Bench, kind: Kind) -> Iterator[CheckRow]:
    """Whole steps of one sequence and of three, fused and through the modules, fed the same tokens; on a device the
    fused ones from a graph."""
    from kvlens.lab.gpu.static import BatchDecoder

    model = _small_model(bench, kind)
    for name in _methods(bench, kind):
        for batch in (1, 3):
            plain, fused = (
                BatchDecoder([_decoder(model, name, 300 + seed) for seed in range(batch)]) for _ in range(2)
            )
            worst = 0.0
            try:
                fused.fused()
                tokens = [decoder.prompt.ids[-1] for decoder in plain.decoders]
                for step in range(STEPS):
                    expected = plain.step(tokens).double().cpu()
                    if step == STEPS - 1 and not bench.dry:
                        fused.capture()
                    logits = fused.step(tokens).double().cpu()
                    difference = float((logits - expected).norm() / expected.norm())
                    worst = max(worst, difference if difference == difference else float("inf"))
                    tokens = expected.argmax(-1).tolist()
            finally:
                plain.close()
                fused.close()
            tolerance = STEP_TOLERANCE[kind.name]
            row = f"fused step, {kind.name}, {name}, {batch} sequences: logits"
            yield CheckRow(row, worst if worst < float("inf") else -1.0, tolerance, worst <= tolerance)


def _small_model(bench: Bench, kind: Kind) -> LoadedModel:
    """Two layers of a Llama with the 8B model's heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvlens.engine.hf_attention import ATTENTION
    from kvlens.engine.models import LoadedModel
    from kvlens.lab.gpu.model import Letters
    from kvlens.shape import KVShape

    dim = 16 if bench.dry else DIM
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        vocab_size=512,
        num_hidden_layers=2,
        num_attention_heads=HEADS * GROUP,
        num_key_value_heads=HEADS,
        head_dim=dim,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    with torch.inference_mode(False):
        model = LlamaForCausalLM(config).to(kind.dtype).to(bench.device.at)
    model.eval().requires_grad_(False)
    model.set_attn_implementation(ATTENTION)
    shape = KVShape(2, HEADS * GROUP, HEADS, dim, kind.dtype.itemsize)
    return LoadedModel("random weights", model, Letters(), shape, 4096, True, frozenset())


def _methods(bench: Bench, kind: Kind) -> list[str]:
    """One method of each family that attends all it keeps or selects between steps, and in fp32 the one with most in
    its step: elsewhere rounding changes what it selects."""
    families: dict[str, str] = {}
    for setting in settings().values():
        method = methods.get(setting.method)
        if method.selects_between_steps or method.select is Method.select:
            families.setdefault(method.family, setting.method)
    return [*families.values(), *([busiest(bench).method] if kind.name == "fp32" else [])]


def _decoder(model: LoadedModel, name: str, tokens: int) -> Any:
    from kvlens.engine.options import Options
    from kvlens.lab.gpu.static import StaticDecoder
    from kvlens.memory.budget import Budget
    from kvlens.text.prompts import Prompt, PromptText

    method = methods.get(name)
    preset = "demo" if "demo" in method.presets else None
    params = methods.make_parameters(method, preset, dict(method.untrained))
    ids = tuple(torch.randint(3, 512, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist())
    prompt = Prompt(PromptText("random"), ids, ("a",) * tokens, (None,) * tokens)
    limit = None if method.keeps_all else Budget.parse(BUDGET)
    return StaticDecoder(model, prompt, method, params, limit, Options(max_new=8, ignore_eos=True))


PART = Part(
    "step checks",
    measure,
    ("step_checks.py", "kernel_checks.py", *decode.FILES),
    "free the device's memory; this part takes 1 GB",
)
