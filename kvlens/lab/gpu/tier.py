"""The engine on the device, on the demo model: FullKV against the stock model; every method against itself on the host
in fp32, its choices one by one; recorded against not recorded, bit for bit. What runs first on a machine with a GPU:
pinned memory, streams, events and the kernels as sessions use them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from kvlens.lab.gpu.choices import DRAWS, MOVED, Probe, compare, first_pair, flips, watched
from kvlens.lab.gpu.failures import sentence
from kvlens.lab.gpu.part import Bench, Part
from kvlens.lab.gpu.settings import on_device
from kvlens.lab.gpu.verdicts import TIE, Choice, Verdict
from kvlens.lab.results.gpu import CheckRow
from kvlens.records import PrefillRecord, StepRecord

if TYPE_CHECKING:
    from kvlens.engine.engine import Result
    from kvlens.engine.models import LoadedModel
    from kvlens.engine.prefill import ReadPrompt
    from kvlens.methods.base import Method
    from kvlens.records import TraceSink
    from kvlens.text.prompts import Prompt

LENGTH, NEW, SHARE = 512, 16, "0.3"
RECORDED = 8
"""steps that are made recorded and not recorded"""
DTYPES = {"float32": "fp32", "bfloat16": "bf16"}
SMALLER = "free memory of the device"
BEHIND = "behind a tie of choices"


@dataclass
class Sink:
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


@dataclass(frozen=True)
class Ground:
    """A model with the prompt, read once for all methods that read under full attention."""

    loaded: LoadedModel
    prompt: Prompt
    read: ReadPrompt

    @classmethod
    def build(cls, device: str, dtype: str, steps: int) -> Ground:
        from kvlens import methods
        from kvlens.demo.encode import demo_encode
        from kvlens.demo.tasks import make_prompt
        from kvlens.engine.engine import Engine
        from kvlens.engine.models import load
        from kvlens.text.prompts import PromptText, tokenize

        loaded = load("demo", device, dtype)
        text = make_prompt("multikey", LENGTH, 0.5, 0, demo_encode()).text
        prompt = tokenize(PromptText(text), loaded.tokenizer, loaded.max_positions, steps)
        queries = max(method.needs.queries for method in methods.registry().values())
        return cls(loaded, prompt, Engine(loaded).read(prompt, queries=max(1, queries), received=True))


@dataclass(frozen=True)
class Way:
    """A method as the engine is tried with it."""

    name: str
    overrides: dict[str, Any]
    tolerance: float
    """share by which bytes may differ"""
    steps: int

    @property
    def title(self) -> str:
        return f"{self.name}{f' {self.overrides}' if self.overrides else ''}"

    def run(
        self, ground: Ground, sink: TraceSink | None, choices: list[Choice] | None = None, probe: Probe | None = None
    ) -> Result:
        """sink None: nothing is recorded; choices: where they are noted."""
        from kvlens import methods
        from kvlens.budget import Budget
        from kvlens.engine.engine import Engine, Options

        method: type[Method] = methods.get(self.name)
        params = methods.make_parameters(method, "demo" if "demo" in method.presets else None, self.overrides)
        least = method.floor_bytes(params, ground.loaded.shape, LENGTH, self.steps) if method.floor_is_exact else 0
        small = least > float(SHARE) * ground.loaded.shape.full_kv_bytes(LENGTH)
        budget = None if method.keeps_all or small else Budget.parse(SHARE)
        options = Options(max_new=self.steps, ignore_eos=True, coverage=sink is not None)
        watched_method = method if choices is None else watched(method, choices, probe)
        return Engine(ground.loaded).run(
            ground.prompt, watched_method, params, budget, options, sink, keep_logits=True, read=ground.read
        )


def ways(steps: int) -> list[Way]:
    """Every registered method, as it says that it is tried on a device."""
    from kvlens import methods

    return [Way(name, *way, steps) for name, method in methods.registry().items() for way in on_device(method)]


def moving() -> list[Way]:
    """Those whose KV moves between the tiers, found by what a step on the host asks of the memory."""
    host, moved = Ground.build("cpu", "float32", 1), []
    for way in ways(1):
        sink = Sink()
        way.run(host, sink)
        moved += [way] if sum(sink.bytes.values()) else []
    return moved


def measure(bench: Bench) -> Iterator[CheckRow]:
    from kvlens.runs.stock import stock_gap

    gap, tokens = stock_gap(str(bench.device.at.type))
    name = f"engine against the stock model, demo, fp32, {tokens} tokens: largest logit difference"
    yield CheckRow(name, gap, 0.0, gap == 0)
    yield from rows(bench.device.at, 3 if bench.dry else NEW)


def rows(device: torch.device, steps: int = NEW) -> Iterator[CheckRow]:
    """For each method: choices, tokens, bytes by the ledger, self-checks, recording. A method that fails is a failed
    check, and the others go on."""
    from kvlens.link.transfers import link_name

    host, ours = (
        Ground.build("cpu", "float32", steps),
        {dtype: Ground.build(str(device), dtype, steps) for dtype in DTYPES},
    )
    links = f"{link_name(device)} against {link_name(torch.device('cpu'))}"
    for way in ways(steps):
        label = f"{way.title}, demo, fp32, {steps} steps, {links}"
        try:
            yield from _against_host(label, way, host, ours["float32"])
            yield from _recording(f"{way.title}, demo", way, ours)
        except Exception as problem:
            yield CheckRow(f"{label}: {sentence(problem, SMALLER)[0]}", -1.0, 0.0, False)


def _against_host(label: str, way: Way, host: Ground, device: Ground) -> Iterator[CheckRow]:
    choices: tuple[list[Choice], list[Choice]] = ([], [])
    host_sink, our_sink = Sink(), Sink()
    host_result, ours = way.run(host, host_sink, choices[0]), way.run(device, our_sink, choices[1])
    verdict = _explained(compare(*choices), way, host, choices)
    yield choice_row(label, verdict)
    yield token_row(f"{label} ({ours.kernels})", host_result, ours, verdict)
    yield _bytes(label, way, host_sink, our_sink, verdict)
    failed = [check.name for check in ours.checks if not check.passed]
    named = f"{': ' * bool(failed)}{', '.join(failed)}"
    wrong = len(failed) + our_sink.backwards
    name = f"{label}: self-checks that fail, copies that end before they begin{named}"
    yield CheckRow(name, float(wrong), 0.0, not wrong)


def _bytes(label: str, way: Way, host: Sink, ours: Sink, verdict: Verdict) -> CheckRow:
    """Behind a tie of choices other things are moved, and bytes are not compared."""
    gap = max(abs(ours.bytes[side] - host.bytes[side]) / max(1, host.bytes[side]) for side in host.bytes)
    name = f"{label}: share of the ledger's {sum(host.bytes.values())} B that differs"
    if verdict.tie:
        return CheckRow(f"{name}, {BEHIND}", gap, way.tolerance, None)
    return CheckRow(name, gap, way.tolerance, gap <= way.tolerance)


def choice_row(label: str, verdict: Verdict) -> CheckRow:
    """Equal or a tie passes; what nothing explains does not."""
    passed, margin = verdict.equal or verdict.tie, -1.0 if verdict.margin is None else verdict.margin
    outcome = verdict.text if verdict.equal else f"the first that differs: {verdict.text}{', a tie' if passed else ''}"
    return CheckRow(f"{label}: choices, {outcome}", margin, TIE, passed)


def token_row(label: str, host: Result, ours: Result, verdict: Verdict) -> CheckRow:
    """Share of tokens that differ. Behind a tie of choices the contexts differ, and tokens are not compared. Where two
    logits tie, how far they lie apart is what is judged; tokens after it are not compared."""
    pairs = list(zip(host.ids, ours.ids, strict=True))
    differing_step = next((step for step, (host_token, two) in enumerate(pairs) if host_token != two), None)
    if differing_step is None:
        return CheckRow(f"{label}: share of tokens that differ", 0.0, 0.0, True)
    logits, (host_token, two) = host.logits[differing_step], pairs[differing_step]
    apart = float((logits[host_token] - logits[two]) / logits.abs().max())
    where = f"first at step {differing_step}, logits {apart:.2g} of the largest apart"
    wrong = sum(host_token != two for host_token, two in pairs) / len(pairs)
    if verdict.tie and verdict.step is not None and differing_step >= verdict.step:
        return CheckRow(f"{label}: share of tokens that differ, {where}, {BEHIND}", wrong, 0.0, None)
    if apart <= TIE:
        return CheckRow(f"{label}: tokens that differ, {where}, a tie", apart, TIE, True)
    return CheckRow(f"{label}: share of tokens that differ, {where}", wrong, 0.0, False)


def _explained(verdict: Verdict, way: Way, host: Ground, choices: tuple[list[Choice], list[Choice]]) -> Verdict:
    """Where a choice that differs has no score, the host is asked again with its query moved a little: what it then
    chooses otherwise itself lay that close."""
    pair = first_pair(*choices)
    if verdict.equal or verdict.margin is not None or pair is None or pair[0].step < 0 or pair[0].layer is None:
        return verdict
    probe = Probe(pair[0].step, pair[0].layer, [])
    way.run(host, None, [], probe)
    flip_count = flips(*pair, probe.found)
    explanation = (
        f"; with its query moved by {MOVED:g} of itself the host chooses otherwise there in {flip_count} of {DRAWS} "
        "draws"
    )
    return Verdict(verdict.text + explanation, MOVED if flip_count else None, verdict.step)


def _recording(label: str, way: Way, ours: dict[str, Ground]) -> Iterator[CheckRow]:
    """Tokens and logits of a run that is recorded against one that is not, on the device, bit for bit."""
    way = replace(way, steps=min(way.steps, RECORDED))
    for dtype, short in DTYPES.items():
        recorded, plain = way.run(ours[dtype], Sink()), way.run(ours[dtype], None)
        wrong, noise = unlike(recorded, plain), ""
        if wrong and unlike(plain, way.run(ours[dtype], None)):
            noise = ", as do those of two runs that are not recorded: the method is not deterministic on this device"
        name = f"{label}, {short}, recorded against not recorded: share of steps whose token or logits differ{noise}"
        yield CheckRow(name, wrong, 0.0, wrong == 0)


def unlike(one: Result, two: Result) -> float:
    """Share of steps with another token or one other bit in the logits."""
    pairs = zip(one.ids, two.ids, one.logits, two.logits, strict=True)
    wrong = [a != b or not torch.equal(x.view(torch.int32), y.view(torch.int32)) for a, b, x, y in pairs]
    return sum(wrong) / len(wrong)


LINK = ("link/cuda_link", "link/host_link", "link/host_memory", "link/copies")
MEMORY = ("memory/memory", "memory/allocator", "memory/zones", "memory/recall", "memory/arrivals")
MOVES = tuple(f"../../{name}.py" for name in (*LINK, *MEMORY))
PART = Part(
    "engine",
    measure,
    ("tier.py", "choices.py", "verdicts.py", "settings.py", *MOVES),
    "free the device's memory; this part takes a few MB",
    runs_methods=True,
)
