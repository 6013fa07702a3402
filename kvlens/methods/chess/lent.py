"""CHESS's trigger, lent to methods that retrieve pages: they select anew only when a page of generated tokens was
uncertain (sec. 3.3), and in between attend the pages of the last selection."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvlens.methods.chess.trigger import THRESHOLDS, is_uncertain, page_uncertainty, thresholds
from kvlens.methods.families.cold_plan import Plan
from kvlens.methods.families.host_pages import HostPageRetrieval
from kvlens.methods.parameters import param
from kvlens.methods.run_inputs import MemoryView, Prefilled, RunContext, StepEnd
from kvlens.methods.wrappers import Lent
from kvlens.shape import KVShape

if TYPE_CHECKING:
    import torch

    from kvlens.methods.hooks import WindowLeave

    Base = HostPageRetrieval
else:
    Base = object

WISH_BYTES = 8
"""one entry of the table of pages, int64"""


@dataclass(frozen=True)
class TriggerParameters:
    """Beside those of the method that retrieves."""

    trigger: str = param(
        "dynamic",
        "when pages are selected anew: dynamic: after an uncertain page of generated tokens; fixed: after every "
        "`interval` pages; never: only at the first step",
        choices=("dynamic", "fixed", "never"),
    )
    interval: int = param(6, "pages between selections with trigger=fixed")
    condition: str = param(
        "and",
        "dynamic: entropy and varentropy above their thresholds, or one of them",
        choices=("and", "or"),
        ours=True,
    )
    varentropy: str = param(
        "page",
        "page: variance of the entropies of a page's tokens; token: mean of the variances of -log p",
        choices=("page", "token"),
        ours=True,
    )
    threshold_entropy: float = param(-1.0, "nats; negative: the calibrated threshold", ours=True)
    threshold_varentropy: float = param(-1.0, "nats squared, likewise", ours=True)
    calibration: str = param("", "file of thresholds; empty: the one shipped for the model", ours=True)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        if self.interval < 1:
            raise ValueError("interval must be at least 1.")

    @property
    def thresholds_given(self) -> bool:
        """Both thresholds are parameters."""
        return self.threshold_entropy >= 0 and self.threshold_varentropy >= 0


class PagesAtTrigger(Base):
    """Keeps the pages that a KV head wished for until the trigger fires; then the method's own ranking is asked. In
    between FreeKV's correction finds nothing else to read. A page of the trigger is `page` steps from the first on;
    CHESS judges the pages of its own cut."""

    static_ready = False
    """a variable of the host decides whether a step selects"""
    calibrations = (replace(THRESHOLDS, maker="chess"),)
    untrained = {"trigger": "fixed"}  # noqa: RUF012
    journal_names = {  # noqa: RUF012
        "page_entropy_nats": "mean entropy of the next-token distributions of a page of generated tokens",
        "page_varentropy_nats2": "varentropy of that page in nats squared, as the parameter varentropy defines it",
        "selected_anew": "of that page: 1 if pages are selected anew at the next step, else 0",
    }
    params: Any

    def __init__(self, params: Any, context: RunContext) -> None:
        super().__init__(params, context)
        self._thresholds = thresholds(params, context.calibration.get("thresholds"))
        self._uncertainty: list[tuple[float, float]] = []
        self._since, self._selects = 0, True

    @classmethod
    def own_bytes(cls, params: Any, shape: KVShape, plan: Plan) -> int:
        return super().own_bytes(params, shape, plan) + shape.kv_heads * plan.recall * WISH_BYTES

    def allocate(self, plan: Plan, prompt: Prefilled) -> None:
        import torch

        super().allocate(plan, prompt)
        size = self.context.shape.layers - self.params.dense_layers, self.context.shape.kv_heads, plan.recall
        self._wishes = torch.full(size, -1, dtype=torch.long, device=self.context.device)

    def held(self) -> dict[str, tuple[torch.Tensor, ...]]:
        held = super().held()
        return held and {**held, "wished_pages": (self._wishes,)}

    def wished(self, row: int, score: torch.Tensor) -> torch.Tensor:
        if self._selects:
            self._wishes[row].copy_(super().wished(row, score))
        return self._wishes[row].clone()

    def decode_end(self, end: StepEnd, memory: MemoryView) -> WindowLeave | None:
        import torch

        p = self.params
        self._uncertainty.append((end.next_entropy, end.next_varentropy))
        self._selects = False
        if len(self._uncertainty) == p.page:
            entropy, varentropy = page_uncertainty(self._uncertainty, p.varentropy)
            self._uncertainty, self._since = [], self._since + 1
            self._selects = self._fires(entropy, varentropy)
            self._since = 0 if self._selects else self._since
            names = ("page_entropy_nats", "page_varentropy_nats2", "selected_anew")
            for name, value in zip(names, (entropy, varentropy, float(self._selects)), strict=True):
                self.note(name, torch.tensor([value]))
        return super().decode_end(end, memory)

    def _fires(self, entropy: float, varentropy: float) -> bool:
        p = self.params
        if p.trigger != "dynamic":
            return bool(p.trigger == "fixed" and self._since >= p.interval)
        return is_uncertain(p, self._thresholds, entropy, varentropy)


def refuses_trigger(method: type[Any]) -> str:
    """Return why a method cannot select at a trigger; '': it can."""
    if not issubclass(method, HostPageRetrieval):
        return "it recalls no pages from host memory, so that nothing is selected at a step"
    if issubclass(method, PagesAtTrigger):
        return "it selects at a trigger already"
    return "" if method.wished is HostPageRetrieval.wished else "its own rule evicts pages at every step"


TRIGGER = Lent(
    "chess",
    PagesAtTrigger,
    TriggerParameters,
    "it selects anew only when generated tokens were uncertain",
    refuses_trigger,
)
