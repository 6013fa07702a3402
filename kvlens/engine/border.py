"""The border between the engine and a method: every hook is called here and nowhere else.

The border passes a hook its tensors and compares them afterwards (holdings.py): a hook that changes one in place is
refused. It checks what the hook returns (outputs.py), once. It turns whatever a hook raises, SystemExit included, into
a MethodFault that names the method and the hook; refusals (ValueError while the prompt is placed), shortages of the
machine and a person's Ctrl-C pass as they are. A hook that does not end is interrupted (kvlens/hangs.py).
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvlens import interrupts
from kvlens.budget import BudgetAccount, BudgetInfeasible
from kvlens.engine import outputs
from kvlens.engine.holdings import UNANNOUNCED, Handed, Holdings, Mark, tensors_of
from kvlens.hangs import Hang, Watch, giving_up, limit
from kvlens.memory.memory import Memory
from kvlens.memory.placement import Placement, Selection
from kvlens.methods.base import Method
from kvlens.methods.faults import BUDGET, CHANGED, RAISED, MethodFault, hangs, is_refusal, limited
from kvlens.methods.hooks import BagChange, Hooks, Selecting, WindowLeave
from kvlens.methods.run_inputs import Prefilled, Reading, RunContext, StepEnd
from kvlens.shortage import shortage
from kvlens.tiers.layout import Layout
from kvlens.tiers.slots import SpanTable

WALKED_STEPS = 16
"""steps between two counts of what a method holds unannounced"""


def scored(q: torch.Tensor, scaling: float) -> torch.Tensor:
    """Queries [..., D] by which the model's logits q . k * scaling are q . k / sqrt(D), as every method scores them:
    themselves, but for a family with a factor of its own (Granite) or none (OPT)."""
    usual = q.shape[-1] ** -0.5
    return q if scaling == usual else q * (scaling / usual)


@dataclass
class _View:
    """The part of the memory that a method may read (kvlens.methods.run_inputs.MemoryView)."""

    spans: SpanTable
    window_start: int
    read_window: Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]


class Border:
    """The hooks of one run's method, guarded. Same names and arguments as in kvlens/methods/hooks.py."""

    def __init__(self, method: Method) -> None:
        self._hooks: Hooks = method
        self.layer_hooks = _overridden(method)
        """the hooks of a layer's step that the method overrides: the others do nothing, and nobody calls them"""
        self._method, self._context = type(method), method.context
        self._checks, self._shape = method.checks, method.context.shape
        self._places = 0
        """slots of the largest KV head"""
        self._prompt: Handed = ()
        """what `prefill_end` was handed, until the memory has placed it"""
        self.holdings = Holdings(method, method.context.device)
        self._watch = Watch(limit(), method.name, give_up=giving_up())

    # ---- placement
    @property
    def block(self) -> int:
        return outputs.block(self._checks, self._call("block", lambda: self._hooks.block, ()))

    def reading(self, layer: int, keys: torch.Tensor, tokens: int) -> Reading | None:
        keys = keys.clone()  # the method may keep them
        answer = self._call("reading", lambda: self._hooks.reading(layer, keys, tokens), (("keys", keys),), layer)
        return outputs.reading(self._checks, answer, layer, self._shape, tokens, keys.shape[1])

    def prefill_end(self, prompt: Prefilled) -> tuple[Layout, Placement]:
        self._prompt = tensors_of(prompt)
        weights = [] if prompt.inputs is None else _weights_of(prompt.inputs.modules)
        self.holdings.lend(weights)
        handed = (*self._prompt, *(("weights of the model", weight) for weight in weights))
        try:
            answer = self._call("prefill_end", lambda: self._hooks.prefill_end(prompt), handed, refuses=True)
        except MethodFault:
            _refuse_broken(prompt)
            raise
        layout, placement = outputs.placed(self._checks, answer, self._context)
        heads = ((layer, head) for layer in range(self._shape.layers) for head in range(self._shape.kv_heads))
        self._places = max((layout.zones_of(*place).slots for place in heads), default=0)
        return layout, placement

    # ---- selection
    def written(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        handed = (("keys", keys), ("values", values))
        self._call("written", lambda: self._hooks.written(layer, keys, values), handed, layer)

    def select(
        self, layer: int, q: torch.Tensor, spans: int, position: int, scaling: float | None = None
    ) -> Selection | None:
        """spans: ids that a selection names, position: of the step's token. scaling: of the model's queries; None: q is
        as `scored`."""
        q = (q if scaling is None else scored(q, scaling)).clone()  # the method may keep them
        selection = self._call("select", lambda: self._hooks.select(layer, q), (("queries", q),), layer)
        if selection is not None:
            outputs.selection(self._checks, selection, layer, self._shape, spans, position)
        return selection  # type: ignore[no-any-return]

    def attended(self, layer: int, heads: range, weights: torch.Tensor, position: torch.Tensor) -> None:
        position = position.clone()  # the memory's own table
        handed = (("weights", weights), ("positions", position))
        self._call("attended", lambda: self._hooks.attended(layer, heads, weights, position), handed, layer)

    # ---- lifecycle
    def decode_end(self, end: StepEnd, memory: Memory) -> WindowLeave | BagChange | None:
        view = _View(memory.spans, memory.hot.oldest, memory.hot.read_window)
        names = ("lengths", "log lengths", "starts", "selectable", "device")
        handed = [
            (f"table of spans ({name})", table) for name, table in zip(names, memory.spans.tensors(), strict=True)
        ]
        change = self._call("decode_end", lambda: self._hooks.decode_end(end, view), handed)
        if change is not None:
            outputs.change(self._checks, change, self._shape, self._places, end.position, memory.hot.oldest)
        return change  # type: ignore[no-any-return]

    def count_held(self, account: BudgetAccount, step: int | None = None) -> None:
        """Count what the method holds now: what it announces, and what it holds besides. step: a decode step, at some
        of which alone the method is walked. Raises MethodFault past the budget."""
        held = outputs.held(self._checks, self._call("held", self._hooks.held, self._prompt))
        walks = step is None or step % WALKED_STEPS == 0
        limit, account.limit = account.limit, None  # the fault below has the hook's name
        for name, tensors in held.items():
            account.hold(f"method:{name}", *tensors)
        if walks:
            announced = [tensor for tensors in held.values() for tensor in tensors]
            account.release(UNANNOUNCED)
            hidden = self.holdings.unannounced(announced, account.addresses())
            if hidden:
                account.hold_storages(UNANNOUNCED, hidden)
        account.limit = limit
        if limit is not None and account.resident > limit:
            raise self.over_budget(account.resident, limit)

    def placed(self) -> None:
        """The memory has placed the prompt."""
        self._prompt = ()

    # ---- steps
    def begin_step(self, step: int) -> None:
        """A decode step begins: read the flags of the step before it. Raises MethodFault."""
        self._checks.settle()
        self._checks.step = step

    def end(self) -> None:
        """The last step has ended. Raises as `begin_step`."""
        self._checks.settle()

    def over_budget(self, resident: int, limit: int) -> MethodFault:
        """Return the error of a method that holds more device bytes than its budget."""
        actual = f"{resident:,} bytes"
        return self._checks.fault("held", "exceeds the budget", f"at most {limit:,} bytes", actual, code=BUDGET)

    # ---- the call
    def _call(
        self, hook: str, call: Callable[[], Any], handed: Handed, layer: int | None = None, refuses: bool = False
    ) -> Any:
        """refuses: a ValueError is a sentence for the user, not a fault."""
        marks = [(name, Mark.take(tensor)) for name, tensor in handed if tensor is not None]
        try:
            self._watch.begin(hook)
            try:
                answer = call()
            finally:
                self._watch.end()
        except (MethodFault, BudgetInfeasible):
            raise
        except Hang as error:
            raise hangs(self._checks.method, hook, layer, self._checks.step) from error
        except BaseException as error:
            if _passes(error, self._method if refuses else None):
                raise
            problem = _raised(error, self._method.__module__)
            raise self._checks.fault(hook, problem, layer=layer, code=RAISED) from error
        for name, mark in marks:
            changed = mark.changed()
            if changed is not False:
                problem = f"changed the {name} that it was handed in place"
                self._checks.decide(self._checks.fault(hook, problem, layer=layer, code=CHANGED), changed)
        return answer


def make_method(method: type[Method], params: Any, context: RunContext) -> Method:
    """Return a run's method. Raises MethodFault for what its __init__ raises, refusals apart, and if it does not
    end."""
    hook = "__init__"
    try:
        with limited(method.name, hook):
            return method(params, context)
    except (MethodFault, BudgetInfeasible):
        raise
    except BaseException as error:
        if _passes(error, method):
            raise
        raise MethodFault(RAISED, method.name, hook, _raised(error, method.__module__)) from error


def _passes(error: BaseException, method: type | None) -> bool:
    """Return True for what is not the hook's fault. method: whose refusals pass; None: none do."""
    if isinstance(error, KeyboardInterrupt):
        return interrupts.by_person()
    if method is not None and is_refusal(error, method):
        return True
    return isinstance(error, OSError | MemoryError) or shortage(error) is not None


def _raised(error: BaseException, module: str) -> str:
    """What a hook raised, with file and line in the method's own module, or where the error was raised."""
    message = " ".join(str(error).split())
    words = f"{type(error).__name__}{f': {message[:200]}' if message else ''}"
    frames = traceback.extract_tb(error.__traceback__)
    method_file = getattr(sys.modules.get(module), "__file__", None)
    frame = next((frame for frame in reversed(frames) if frame.filename == method_file), frames[-1])
    return f"raised {words} ({Path(frame.filename).name}, line {frame.lineno})"


def _overridden(method: Method) -> frozenset[str]:
    """Return the hooks of a layer's step that the method overrides. The others do nothing and are not called."""
    hooks = ("written", "select", "attended")
    return frozenset(
        name for name in hooks if getattr(getattr(method, name), "__func__", None) is not getattr(Selecting, name)
    )


def _weights_of(modules: Sequence[Any]) -> list[torch.Tensor]:
    """Parameters and buffers of the model's modules that a method is handed."""
    return [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]


def _refuse_broken(prompt: Prefilled) -> None:
    """Raises ValueError if the model itself computed no finite keys and values."""
    if not (bool(prompt.keys.isfinite().all()) and bool(prompt.values.isfinite().all())):
        raise ValueError("the model computes keys or values that are not finite for this prompt: use --dtype float32.")
