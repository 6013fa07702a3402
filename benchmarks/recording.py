"""What recording costs: the same generation with and without it, interleaved in one process, on the demo model.

    python -m benchmarks.recording [--out FILE]

Prints medians per step and their ratio, the engine thread's own recording time, and the trace's size per step. Timings
of a busy machine mean little; the ratio means more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kvlens import methods
from kvlens.budget import Budget
from kvlens.demo.encode import demo_encode
from kvlens.demo.tasks import make_prompt
from kvlens.engine.engine import Engine, Options
from kvlens.engine.models import load
from kvlens.meta import RunMeta
from kvlens.models.device import machine
from kvlens.store.reader import TraceReader
from kvlens.store.writer import TraceWriter
from kvlens.text.prompts import PromptText, tokenize

LENGTH, STEPS = 1024, 128


def measure(rounds: int) -> dict[str, Any]:
    """Per method: the decode loop's wall time per step, median of the rounds, in microseconds, and what recording
    adds."""
    torch.set_num_threads(1)
    loaded = load("demo")
    result = make_prompt("list", LENGTH, 0.5, 0, demo_encode())
    prompt = tokenize(PromptText(result.text), loaded.tokenizer, loaded.max_positions, STEPS)
    table = {}
    for name, budget in (("full", None), ("streaming_llm", "0.2"), ("sekv", "0.2")):
        method = methods.get(name)
        params = methods.make_parameters(method, "demo" if "demo" in method.presets else None, {})
        table[name] = _time_method(
            loaded, prompt, method, params, None if budget is None else Budget.parse(budget), rounds
        )
    return table


def _time_method(
    loaded: Any, prompt: Any, method: Any, params: Any, budget: Budget | None, rounds: int
) -> dict[str, float]:
    engine, plain, recorded, own_value, sizes = Engine(loaded), [], [], [], []
    for _ in range(rounds):
        options = Options(max_new=STEPS, ignore_eos=True)
        plain.append(engine.run(prompt, method, params, budget, options).decode_s / STEPS)
        with tempfile.TemporaryDirectory() as folder:
            writer = TraceWriter(Path(folder))
            shape = loaded.shape
            writer.begin(RunMeta(layers=shape.layers, q_heads=shape.q_heads, kv_heads=shape.kv_heads, model="demo"))
            result = engine.run(prompt, method, params, budget, options, writer)
            writer.finish("completed", None, result.checks, {})
            recorded.append(result.decode_s / STEPS)
            with TraceReader.open(Path(folder), writer.uid) as reader:
                own_value += reader.steps()["record_us"].tolist()
            sizes.append((Path(folder) / writer.uid / "trace.duckdb").stat().st_size / STEPS)
    step, with_recording = statistics.median(plain) * 1e6, statistics.median(recorded) * 1e6
    return {
        "step_us": round(step),
        "recorded_step_us": round(with_recording),
        "ratio": round(with_recording / step, 3),
        "engine_thread_us": round(statistics.median(own_value)),
        "trace_kb_per_step": round(statistics.median(sizes) / 1000, 1),
    }


def main() -> None:
    """Print the table, and write it where --out says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    table = measure(arguments.rounds)
    report = {
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        "prompt_tokens": LENGTH,
        "steps": STEPS,
        "methods": table,
    }
    for name, row in table.items():
        print(f"{name:14} " + "  ".join(f"{key} {value}" for key, value in row.items()))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
