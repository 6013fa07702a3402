"""Every kernel that static decodes launch, compiled for a GPU that is not there: `python tests/staticlaunches.py`,
without the interpreter.

Launchers run as they do in a step, on CPU tensors of an 8B model's heads; only the launch itself is left out, so what
kernels would have written stays zero. Prints JSON: by case, the binaries of each step's launches in their order.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from static_support import CASES, decoder
from support import random_llama, random_prompt
from test_compiled import on_random
from triton.runtime.jit import JITFunction

from kvlens.lab.gpu import aot
from kvlens.lab.gpu.kernels.zone_plan import zone_plan_triton
from kvlens.lab.gpu.static import StaticDecoder, cuda

STEPS = 5
ARCHITECTURE = 90


def main() -> None:
    model = random_llama(
        dtype=torch.bfloat16,
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    launch, launched = JITFunction.run, []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        compiled = launch(self, *args, grid=grid, warmup=True, **options)
        launched.append(f"{self.fn.__name__} {compiled.hash}")
        return compiled

    JITFunction.run = compile_only
    triton.runtime.driver.set_active(aot._Absent(ARCHITECTURE))  # type: ignore[arg-type]
    torch.Tensor.new_empty = torch.Tensor.new_zeros  # type: ignore[method-assign,assignment]
    found: dict[str, list[list[str]]] = {}
    for case in (on_random(CASES[i]) for i in (0, 2, 5, 8, 13)):
        made: StaticDecoder = decoder(model, random_prompt(400), case, STEPS, kernels="triton")
        made.session.recall.plan, made.session.recall.move = zone_plan_triton, cuda.fetch
        steps = found[case.id] = []
        for _ in range(STEPS):
            launched.clear()
            made.step(made.prompt.ids[-1])
            steps.append(list(launched))
        made.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
