"""The memory that a run compared with full KV takes at its peak, against what was estimated before it starts.

    python -m benchmarks.peakmemory TOKENS METHOD [--drawn]

One process: a random model with the heads of an 8B model (benchmarks.stepcosts) runs a short prompt, so that all is
imported and warm, and then the long one. It prints one JSON object: the largest resident size of each phase above the
resident size before the run, in full KVs of the run, and the estimate. --drawn: the prompt's keys and values are drawn,
not computed, so that no prefill is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.stepcosts import HEADS, SEED, TASK, draw, random_model
from kvlens import tasks
from kvlens.api.models import Given
from kvlens.engine.engine import Engine
from kvlens.engine.models import LoadedModel
from kvlens.engine.prefill import ReadPrompt
from kvlens.methods.fitting import Sizes
from kvlens.runs.carrying import carry_out
from kvlens.runs.memory import memory_need
from kvlens.runs.preparing import prepare, sizes_of
from kvlens.runs.request import RunRequest
from kvlens.tasks.encoding import encoding_of
from kvlens.text.prompts import Prompt, PromptText

WARM, STEPS, EVERY_S = 256, 8, 0.005


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Peaks:
    """The largest resident size of each phase of a run, read every few milliseconds by a thread of its own."""

    def __init__(self) -> None:
        self.base, self.phase = resident(), "begin"
        self.bytes: dict[str, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def report(self, phase: str, count: int, total: int) -> None:
        """Take the phase that a run reports. The sizes so far go to stderr, for a run that is killed."""
        if phase != self.phase:
            print(json.dumps(self.bytes), file=sys.stderr, flush=True)
        self.phase = phase

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, sizes are read."""
        self._thread.start()
        try:
            yield
        finally:
            self._ended.set()
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            size = resident() - self.base
            self.bytes[self.phase] = max(size, self.bytes.get(self.phase, 0))


def prompt_of(loaded: LoadedModel, tokens: int) -> PromptText:
    """Return a drawn prompt of about so many tokens."""
    return tasks.prompt_of(tasks.ask(tasks.get(TASK), tokens, 0.5, SEED, encoding_of(loaded.tokenizer)))


def drawn_reading(engine: Engine, prompt: Prompt, chunk: int, queries: int, received: bool, *rest: Any) -> ReadPrompt:
    """Return a drawn reading. It has the attention that tokens received if a method asks for it."""
    read = draw(engine.loaded, prompt)
    return read if received else replace(read, received=None)


def measure(tokens: int, method: str, drawn: bool) -> dict[str, Any]:
    """Run and return the peaks."""
    torch.set_num_threads(1)
    loaded = random_model()
    if drawn:
        Engine.read = drawn_reading  # type: ignore[assignment, method-assign]
    request = RunRequest(model=HEADS, method=method, max_new=STEPS, against=True, chat="off", ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        runs, models = Path(folder), Given(loaded)
        carry_out(request, prompt_of(loaded, WARM), runs, lambda *_: None, lambda: False, models=models)
        prompt = prompt_of(loaded, tokens)
        sizes: Sizes = sizes_of(request, prepare(request, prompt, lambda *_: None, models=models))
        need = memory_need(request, sizes)
        gc.collect()
        peaks, start_s, wall = Peaks(), time.process_time(), time.perf_counter()
        with peaks.watching():
            carry_out(request, prompt, runs, peaks.report, lambda: False, models=models)
    return {
        "tokens": sizes.prompt_tokens + 1,
        "method": method,
        "drawn": drawn,
        "full_kv_bytes": need.full_kv,
        "peak": round(max(peaks.bytes.values()) / need.full_kv, 2),
        "estimate": round(need.total / need.full_kv, 2),
        "phases": {phase: round(size / need.full_kv, 2) for phase, size in peaks.bytes.items()},
        "cpu_s": round(time.process_time() - start_s, 1),
        "wall_s": round(time.perf_counter() - wall, 1),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    """Measure one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", type=int)
    parser.add_argument("method")
    parser.add_argument("--drawn", action="store_true")
    options = parser.parse_args()
    print(json.dumps(measure(options.tokens, options.method, options.drawn)), flush=True)


if __name__ == "__main__":
    main()
