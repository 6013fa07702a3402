"""Speed on a real model as ratios inside one process: kvlens against transformers' own generation, recording against
none, every method against FullKV; and how long a new process takes to its first token.

    python -m benchmarks.real_model [--rounds N] [--length TOKENS] [--methods NAMES] [--model MODEL] [--out FILE]

Without --methods all are measured, with --methods "" FullKV alone; lines of arms that are in FILE and were not measured
now stay, with the date of their sitting.

All arms take turns, round by round; a ratio is taken inside each round and the median of the rounds is told with the
smallest and the largest, so that a busy machine slows both sides. Prefill, decoding and what comes after the last step
(the prompt's surprisals, the end of the trace) are told apart, and together.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.cold_start import cold
from kvlens import methods, tasks
from kvlens.budget import Budget, BudgetInfeasible
from kvlens.engine.engine import Engine, Options
from kvlens.engine.hf_attention import attending
from kvlens.engine.models import LoadedModel, load
from kvlens.engine.options import Result
from kvlens.engine.prefill import ReadPrompt
from kvlens.lab.bench.provenance import about
from kvlens.lab.bench.trialprompts import Trial
from kvlens.lab.bench.trials import chosen, header
from kvlens.meta import RunMeta
from kvlens.models.find import default_model
from kvlens.store.writer import TraceWriter
from kvlens.tasks.encoding import encoding_of
from kvlens.text.prompts import Prompt, tokenize

STEPS, SEED, BUDGET = 24, 8_500_000, "20%"
COLD = 256
"""tokens of the prompt that a new process is given"""
Times = dict[str, float]
"""seconds: prefill, step (of one), after (from the end of the last step to the end of the run), total (all of it)"""


class Speed:
    """One prompt and what is run on it."""

    def __init__(self, model: str, length: int) -> None:
        self.loaded: LoadedModel = load(model)
        self.engine, self.length, self.task = Engine(self.loaded), length, tasks.usual(model)[0]
        self.prompt = self.prompt_of(length)
        self.options = Options(max_new=STEPS, ignore_eos=True)
        self.presets: dict[str, str | None] = {methods.REFERENCE: None}
        """what each method ran with"""

    def prompt_of(self, length: int) -> Prompt:
        """A prompt of that length, whose text and opening are then `asked`'s."""
        encoding = encoding_of(self.loaded.tokenizer)
        self.asked = tasks.ask(tasks.get(self.task), length, 0.5, SEED, encoding)
        return tokenize(tasks.prompt_of(self.asked), self.loaded.tokenizer, self.loaded.max_positions, STEPS)

    @torch.inference_mode()
    def stock(self) -> Times:
        """The model's own `generate`, with its own attention and cache."""
        model: Any = self.loaded.model
        with attending(model, "sdpa"):
            prefill_s, whole = (self._generate(model, new) for new in (1, 1 + STEPS))
        return {"prefill": prefill_s, "step": (whole - prefill_s) / STEPS, "after": 0.0, "total": whole}

    def _generate(self, model: Any, new: int) -> float:
        ids = torch.tensor([self.prompt.ids])
        cache, started = DynamicCache(config=model.config), time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            min_new_tokens=new,
            max_new_tokens=new,
            do_sample=False,
        )
        return time.perf_counter() - started

    def full(self, coverage: bool | None = None) -> Times:
        """FullKV here; coverage: recorded with spans, and with full attention's mass where true; None: not recorded."""
        method = methods.get(methods.REFERENCE)
        params, clock = methods.make_parameters(method, None, {}), Clock()
        if coverage is None:
            return clock.times(self.engine.run(self.prompt, method, params, None, self.options, None, clock))
        shape, options = self.loaded.shape, Options(max_new=STEPS, ignore_eos=True, coverage=coverage)
        with tempfile.TemporaryDirectory() as folder:
            writer = TraceWriter(Path(folder))
            writer.begin(RunMeta(layers=shape.layers, q_heads=shape.q_heads, kv_heads=shape.kv_heads))
            result = self.engine.run(self.prompt, method, params, None, options, writer, clock)
            writer.surprisals(result.surprisal.whole().numpy())
            writer.finish("completed", None, result.checks, {})
            return clock.times(result)

    def method(self, name: str, read: ReadPrompt) -> Times:
        """A method on a prompt that was read: its prefill is placing it. Raises BudgetInfeasible, or ValueError with
        one sentence, where it cannot be run on it."""
        method = methods.get(name)
        row = header(Trial(self.task, self.length, 0.5, SEED, 0, name, BUDGET), self.loaded.name)
        limit = Budget.parse(BUDGET) if row["rule"] == "resident bytes" else None
        preset_choice = chosen(self.engine, self.prompt, method, row, limit, self.options)
        self.presets[method.name], clock = preset_choice.preset, Clock()
        return clock.times(
            self.engine.run(self.prompt, method, preset_choice.params, limit, self.options, None, clock, read=read)
        )

    def cold(self, rounds: int) -> dict[str, float]:
        """See benchmarks.cold_start; of a prompt of COLD tokens under FullKV."""
        self.prompt_of(COLD)
        prompt = {"text": self.asked.text, "answer_prefix": self.asked.opening}
        return {"prompt_tokens": COLD} | cold(["--model", self.loaded.name, "--method", "full"], prompt, rounds)


class Clock:
    """Begins with a run, and hears when its last step has ended."""

    def __init__(self) -> None:
        self._began = self._stepped = time.perf_counter()

    def __call__(self, phase: str, done: int, total: int) -> None:
        self._stepped = time.perf_counter()

    def times(self, result: Result) -> Times:
        """Of a run that ends now."""
        ended = time.perf_counter()
        step = result.decode_s / len(result.ids)
        return {"prefill": result.prefill_s, "step": step, "after": ended - self._stepped, "total": ended - self._began}


def measure(
    model: str,
    length: int,
    rounds: int,
    names: list[str],
    say: Callable[[str], None],
    previous: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """All ratios, and the milliseconds behind them; `names`: the methods beside FullKV; `previous`: what an earlier
    sitting found, with which `keep_lines` will be asked. Raises SystemExit, before anything is measured, where that was
    measured on something else."""
    torch.set_num_threads(1)
    speed = Speed(model, length)
    sizes = {"prompt_tokens": len(speed.prompt.ids), "steps": STEPS, "budget": BUDGET, "rounds": rounds}
    provenance = about((methods.REFERENCE, *names), model) | {"model": model, "presets": speed.presets} | sizes
    if previous is not None:
        refuse_other(previous["about"], provenance)
    queries = max([128, *(methods.get(name).needs.queries for name in names)])
    read = speed.engine.read(speed.prompt, queries=queries, received=True)
    arms: dict[str, Callable[[], Times]] = {
        "transformers": speed.stock,
        "full": speed.full,
        "full, recorded with spans": lambda: speed.full(False),
        "full, recorded with coverage": lambda: speed.full(True),
    }
    arms |= {name: partial(speed.method, name, read) for name in names}
    seconds: dict[str, list[Times]] = {name: [] for name in arms}
    refused: dict[str, str] = {}
    for turn in range(rounds + 1):
        for name, arm in arms.items():
            if name in refused:
                continue
            try:
                took = arm()
            except (BudgetInfeasible, ValueError) as error:
                refused[name] = str(error)
                continue
            if turn:  # the first turn warms up
                seconds[name].append(took)
        say(f"round {turn} of {rounds}")
    return {"about": provenance, "refused": refused, "ratios": ratios(seconds), "cold": speed.cold(rounds)}


def ratios(seconds: dict[str, list[Times]]) -> list[dict[str, Any]]:
    """arm, part (prefill, step, after, total), against, ratio (median over the rounds), low, high (of the rounds), ms
    (median of the arm's own). A method's prefill is its placing of a prompt that was read, against FullKV's whole
    prefill, and its total is left out. What comes after the last step of an arm that reads the prompt itself is told
    as a share of FullKV's prefill."""
    lines = []
    for name, took in seconds.items():
        against = "transformers" if name == "full" else "full"
        if name == "transformers" or not took:
            continue
        parts = {"prefill": "prefill", "step": "step"}
        if name.startswith("full"):
            parts |= {"total": "total"} if name == "full" else {"after": "prefill", "total": "total"}
        for part, their_part in parts.items():
            each = [times[part] / theirs[their_part] for times, theirs in zip(took, seconds[against], strict=True)]
            milliseconds = median(times[part] for times in took) * 1e3
            line = {"arm": name, "part": part, "against": against, "ratio": median(each)}
            lines.append(line | {"low": min(each), "high": max(each), "ms": milliseconds})
    return lines


def refuse_other(previous: dict[str, Any], now: dict[str, Any]) -> None:
    """Raises SystemExit where two sittings, by what each says of itself, measured on something else."""
    alike = ("model", "prompt_tokens", "steps", "budget", "machine")
    if any(previous[name] != now[name] for name in alike):
        raise SystemExit("the file holds figures of another model, prompt or machine: give another --out.")


def keep_lines(previous: dict[str, Any], now: dict[str, Any]) -> list[dict[str, Any]]:
    """Lines of arms that were measured before and not now, each with the date of its sitting."""
    arms, date = {line["arm"] for line in now["ratios"]}, previous["about"]["date"]
    now["about"]["presets"] = previous["about"]["presets"] | now["about"]["presets"]
    return [{"date": date} | line for line in previous["ratios"] if line["arm"] not in arms]


def main() -> None:
    """Print the table, and write it where --out says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--methods", default=",".join(methods.registry()))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    names = [name for name in options.methods.split(",") if name and name != methods.REFERENCE]
    previous = json.loads(options.out.read_text(encoding="utf-8")) if options.out and options.out.is_file() else None
    result = measure(
        options.model, options.length, options.rounds, names, partial(print, file=sys.stderr, flush=True), previous
    )
    for line in result["ratios"]:
        print(
            f"{line['arm']:30} {line['part']:8} {line['ratio']:.2f} x {line['against']} "
            f"({line['low']:.2f}-{line['high']:.2f}), {line['ms']:.0f} ms"
        )
    for name, why in result["refused"].items():
        print(f"{name:30} {why}")
    print("cold start: " + ", ".join(f"{name} {value:.1f}" for name, value in result["cold"].items()))
    if options.out:
        if previous is not None:
            result["ratios"] += keep_lines(previous, result)
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
