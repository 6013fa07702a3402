"""The engine on the device: FullKV against the stock model, every method against itself on the CPU, on the demo model
in fp32. What runs first on a machine with a GPU: pinned memory, streams, events and the kernels as sessions use them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvlens.gpu.bench.failures import sentence
from kvlens.gpu.bench.part import Bench, Part
from kvlens.gpu.bench.result import CheckRow
from kvlens.gpu.bench.settings import on_device
from kvlens.rows import PrefillRecord, StepRecord

if TYPE_CHECKING:
    from kvlens.engine.models import LoadedModel

LENGTH, NEW, SHARE = 512, 16, "0.3"


@dataclass
class _Sink:
    """Adds up what the ledger says."""

    bytes: dict[str, int] = field(default_factory=lambda: {"h2d": 0, "d2h": 0})
    backwards: int = 0
    """copies that end before they begin"""

    def prefill(self, record: PrefillRecord) -> None:
        self._add(record)

    def step(self, record: StepRecord) -> None:
        self._add(record)

    def _add(self, record: PrefillRecord | StepRecord) -> None:
        for row in record.transfers:
            self.bytes[row.direction] += row.bytes
            self.backwards += row.end_us < row.start_us


def measure(bench: Bench) -> list[CheckRow]:
    from kvlens.runs.stock import stock_gap

    gap, tokens = stock_gap(str(bench.device.at.type))
    name = f"engine against the stock model, demo, fp32, {tokens} tokens: largest logit difference"
    return [CheckRow(name, gap, 0.0, gap == 0), *rows(bench.device.at, 3 if bench.dry else NEW)]


def rows(device: torch.device, steps: int = NEW) -> list[CheckRow]:
    """For each method: tokens, bytes by the ledger, self-checks. A method that fails is a failed check, and the others
    go on."""
    from kvlens import methods
    from kvlens.engine.models import load
    from kvlens.memory.links import link_name

    found, loaded = [], (load("demo", "cpu"), load("demo", str(device)))
    links = f"{link_name(device)} against {link_name(torch.device('cpu'))}"
    ways = [(name, *way) for name, method in methods.registry().items() for way in on_device(method)]
    for name, overrides, tolerance in ways:
        label = f"{name}{f' {overrides}' if overrides else ''}, demo, fp32, {steps} steps, {links}"
        try:
            found += _compare(label, name, overrides, loaded, tolerance, steps)
        except Exception as problem:
            found.append(CheckRow(f"{label}: {sentence(problem, 'free memory of the device')[0]}", -1.0, 0.0, False))
    return found


def _compare(
    label: str,
    name: str,
    overrides: dict[str, Any],
    loaded: tuple[LoadedModel, LoadedModel],
    tolerance: float,
    steps: int,
) -> list[CheckRow]:
    """loaded: the model on the host and on the device."""
    (host, host_sink), (ours, our_sink) = (_run(name, overrides, one, steps) for one in loaded)
    wrong = sum(a != b for a, b in zip(host.ids, ours.ids, strict=True)) / len(host.ids)
    gap = max(abs(our_sink.bytes[way] - host_sink.bytes[way]) / max(1, host_sink.bytes[way]) for way in host_sink.bytes)
    failed = [check.name for check in ours.checks if not check.passed]
    return [
        CheckRow(f"{label}: share of tokens that differ ({ours.kernels})", wrong, 0.0, wrong == 0),
        CheckRow(
            f"{label}: share of the ledger's {sum(host_sink.bytes.values())} B that differs",
            gap,
            tolerance,
            gap <= tolerance,
        ),
        CheckRow(
            (
                f"{label}: self-checks that fail, copies that end before they "
                f"begin{': ' * bool(failed)}{', '.join(failed)}"
            ),
            float(len(failed) + our_sink.backwards),
            0.0,
            not failed and not our_sink.backwards,
        ),
    ]


def _run(name: str, overrides: dict[str, Any], loaded: LoadedModel, steps: int) -> tuple[Any, _Sink]:
    from kvlens import methods
    from kvlens.demo.encode import demo_encode
    from kvlens.demo.tasks import make_prompt
    from kvlens.engine.engine import Engine, Options
    from kvlens.memory.budget import Budget
    from kvlens.text.prompts import PromptText, tokenize

    method = methods.get(name)
    params = methods.make_parameters(method, "demo" if "demo" in method.presets else None, overrides)
    text = make_prompt("multikey", LENGTH, 0.5, 0, demo_encode()).text
    prompt = tokenize(PromptText(text), loaded.tokenizer, loaded.max_positions, steps)
    budget = None if method.keeps_all else Budget.parse(SHARE)
    sink = _Sink()
    return Engine(loaded).run(
        prompt, method, params, budget, Options(max_new=steps, ignore_eos=True, coverage=True), sink
    ), sink


LINK = ("cudalink", "link", "links", "pinned", "streams", "tiers", "placer", "recall", "recaller")
MEMORY = tuple(f"../../memory/{name}.py" for name in LINK)
PART = Part(
    "engine",
    measure,
    ("tier.py", "settings.py", *MEMORY),
    "free the device's memory; this part takes a few MB",
    runs_methods=True,
)
