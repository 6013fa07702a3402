"""How many operations PyTorch dispatches in one layer of a decode step, by method: a count, the same on every machine.

    python -m benchmarks.stepcalls [--model smollm2] [--tokens 1024] [--methods full,snapkv,freekv]

Prints a line per method: the operations of a run of FIRST + 8 steps less those of a run of FIRST steps, by step and
layer; 20 % of full KV, not recorded. Views count, and so do the operations of the model's own layers. What NumPy and
Python do does not count.
"""

from __future__ import annotations

import argparse
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.stepcosts import FIRST, Arm, Costs
from kvlens import methods
from kvlens.budget import BudgetInfeasible

STEPS = 8


class Calls(TorchDispatchMode):
    """Counts the operations that are dispatched inside its block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), named: Any = None) -> Any:
        self.count += 1
        return operation(*args, **(named or {}))


def calls_of(costs: Costs, method: str, prompt: Any, read: Any) -> float:
    """Return the operations of one layer of one step. Raises BudgetInfeasible or ValueError."""
    counts = []
    for steps in (FIRST, FIRST + costs.steps):
        with Calls() as calls:
            costs.run_steps(Arm(method), prompt, read, steps)
        counts.append(calls.count)
    return (counts[1] - counts[0]) / costs.steps / costs.loaded.shape.layers


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--methods", default=",".join(entry["name"] for entry in methods.catalogue()))
    options = parser.parse_args()
    costs = Costs(options.model, STEPS)
    prompt, read = costs.read(options.tokens)
    for name in options.methods.split(","):
        try:
            print(f"{name} {calls_of(costs, name, prompt, read):.0f}", flush=True)
        except (BudgetInfeasible, ValueError) as error:
            print(f"{name} refused: {error}", flush=True)


if __name__ == "__main__":
    main()
