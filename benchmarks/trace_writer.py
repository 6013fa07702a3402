"""What the open format's writer costs an engine: the example engine decodes with and without it, in turns.

    python -m benchmarks.trace_writer [--rounds N]

Prints the median wall and processor time of a decode step of both, and their ratio. Timings of a busy machine mean
little; the ratio means more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from kvlens.demo import demo_path
from kvlens.demo.encode import demo_encode
from kvlens.demo.tasks import make_prompt

LENGTH, STEPS, PAGE = 1024, 64, 16
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


class NoWriter:
    """A writer that writes nothing."""

    def __init__(self, folder: Path, **about: Any) -> None:
        self.steps, self.spent_s = 0, 0.0

    def step(self, *token: Any, **columns: Any) -> None:
        """Count the step."""
        self.steps += 1

    def __getattr__(self, name: str) -> Any:
        return lambda *values, **columns: None


def measure(rounds: int) -> dict[str, tuple[float, float]]:
    """Wall and processor time of a decode step in ms, medians of the rounds, by writer."""
    sys.path.insert(0, str(EXAMPLES))
    import llama  # type: ignore[import-not-found]
    import paged_serving  # type: ignore[import-not-found]

    model = llama.Llama(demo_path())
    model.stop = -1
    text = make_prompt("needle", LENGTH, 0.5, 0, demo_encode()).text
    writers = {"without": NoWriter, "with": paged_serving.Writer}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in writers}
    for _ in range(rounds):
        for name, writer in writers.items():
            paged_serving.Writer = writer
            with tempfile.TemporaryDirectory() as folder:
                pool = paged_serving.Pool(model, LENGTH // PAGE + STEPS, PAGE)
                request = paged_serving.Request(0, text, model, pool, Path(folder))
                request.admit()
                request.log_pages(0, (request.prompt - 1) // PAGE)
                start_wall, start_cpu = time.perf_counter(), time.process_time()
                for _ in range(STEPS):
                    request.step(start_wall)
                request.end()
                wall, cpu = time.perf_counter() - start_wall, time.process_time() - start_cpu
                times[name].append((1e3 * wall / STEPS, 1e3 * cpu / STEPS))
    medians = {}
    for name, pairs in times.items():
        walls, cpus = zip(*pairs, strict=True)
        medians[name] = statistics.median(walls), statistics.median(cpus)
    return medians


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    medians = measure(rounds)
    print("| writer | wall per step (ms) | processor per step (ms) |")
    print("| --- | ---: | ---: |")
    for name, (wall, cpu) in medians.items():
        print(f"| {name} | {wall:.2f} | {cpu:.2f} |")
    ratios = [medians["with"][index] / medians["without"][index] for index in (0, 1)]
    print(f"| ratio | {ratios[0]:.3f} | {ratios[1]:.3f} |")
    print(f"\nn = {rounds} rounds of {STEPS} steps, {LENGTH} prompt tokens, demo model (6 layers, 8 query heads).")


if __name__ == "__main__":
    main()
