"""A race's clock over the decode times of its lanes, added: what racing costs beyond the steps themselves.

    python -m benchmarks.races [--races 5] [--tokens 1200] [--steps 24] [--out FILE]

One process races six methods at 20 % of full KV on generated prompts, one prompt per race. The clock runs from the
start of the first step of a method to the end of the last step of all methods. A lane's decode time is the `decode_s`
that its run stores: its steps and their recording, without the comparison with full KV. Full KV's lane ends before the
clock starts. Each race is a row of the JSON file: wall seconds, processor seconds from the end of the first step on,
decode times and step times added over lanes, and the clock over the decode times.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from kvlens import __version__, tasks
from kvlens.models.device import machine
from kvlens.runs.frames import Frame, Maps
from kvlens.runs.race import race
from kvlens.runs.races import Entrant, Lane, RaceInfo, RaceRequest
from kvlens.runs.request import RunRequest
from kvlens.store.reader import TraceReader
from kvlens.store.runinfo import now
from kvlens.tasks.encoding import encoding

METHODS = ("snapkv", "streaming_llm", "h2o", "chunkkv", "freekv", "compresskv")
BUDGET, TASK, MODEL = "20%", "niah_single", "smollm2"
SEED = 8_600_000
"""of the first prompt"""
OUT = Path("kvlens/lab/results/races.json")


class StepClock:
    """Watches a race and notes when its methods end their first and their last step."""

    def __init__(self) -> None:
        self.first: tuple[float, float] | None = None
        self.last = (0.0, 0.0)

    def frame(self, frame: Frame) -> None:
        if frame["lane"]:
            self.last = time.perf_counter(), time.process_time()
            self.first = self.first or self.last

    def report(self, phase: str, number: int, total: int) -> None: ...
    def begun(self, race: RaceInfo) -> None: ...
    def lane(self, number: int, lane: Lane) -> None: ...
    def maps(self, maps: Maps) -> None: ...


def measure(seed: int, tokens: int, steps: int) -> dict[str, Any]:
    """Run one race and return its row."""
    prompt = tasks.prompt_of(tasks.ask(tasks.get(TASK), tokens, 0.5, seed, encoding(MODEL)))
    shared = RunRequest(model=MODEL, method="full", budget=BUDGET, max_new=steps, ignore_eos=True)
    request = RaceRequest(shared=shared, entrants=tuple(Entrant(method=name) for name in METHODS))
    clock = StepClock()
    with tempfile.TemporaryDirectory() as folder:
        lanes = race(request, prompt, Path(folder), clock, lambda: False).lanes[1:]
        times = [_times(Path(folder), lane) for lane in lanes]
    assert clock.first is not None
    opening = times[0][2][0]
    wall, processor = clock.last[0] - clock.first[0] + opening, clock.last[1] - clock.first[1]
    decode = sum(seconds for seconds, _, _ in times)
    return {
        "seed": seed,
        "steps": [len(steps) for _, _, steps in times],
        "clock_s": round(wall, 3),
        "processor_s": round(processor, 3),
        "decode_s": round(decode, 3),
        "full_kv_s": round(sum(seconds for _, seconds, _ in times), 3),
        "steps_s": round(sum(sum(steps) for _, _, steps in times), 3),
        "ratio": round(wall / decode, 3),
    }


def _times(folder: Path, lane: Lane) -> tuple[float, float, list[float]]:
    """Return the seconds of a lane's decoding, of full KV beside it, and of each of its steps."""
    assert lane.uid is not None, lane.message
    with TraceReader.open(folder, lane.uid) as reader:
        steps = [float(us) / 1e6 for us in reader.steps()["dur_us"]]
        return reader.meta.decode_s or 0.0, reader.meta.full_kv_s or 0.0, steps


def main() -> None:
    """Measure the races and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--races", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1200)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    measure(SEED, options.tokens, 4)  # loads and warms all parts
    rows = []
    for number in range(options.races):
        rows.append(measure(SEED + number, options.tokens, options.steps))
        print(json.dumps(rows[-1]), flush=True)
    about = {"kvlens": __version__, "machine": machine(), "date": now()[:10], "model": MODEL, "task": TASK}
    choice = {"methods": METHODS, "budget": BUDGET, "tokens": options.tokens, "steps": options.steps}
    ratio = median(row["ratio"] for row in rows)
    options.out.write_text(json.dumps({"about": about | choice, "ratio": ratio, "races": rows}, indent=1) + "\n")
    print(f"{options.out}: the clock over the decode times, median of {len(rows)}: {ratio}")


if __name__ == "__main__":
    main()
