"""Under what SeKV's claims are checked on a model: tasks, lengths, budgets, the parameters of the whole method, and the
arms that change one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlens.methods.sekv.params import SeKVParameters
from kvlens.models.find import DEMO

UNTRAINED_SHARE = 0.05
"""of (query, span) pairs that the untrained gate asks for: the default of zoom_rate"""


@dataclass(frozen=True)
class Setting:
    """One model's. Lengths in tokens, budgets in shares of full KV."""

    model: str
    """what sentences call it"""
    trained: bool
    """whether a router is shipped that was trained for it"""
    preset: str | None
    """None: the paper's numbers, or `fit` where they do not fit"""
    tasks: tuple[str, ...]
    length: int
    budget: str
    map_length: int
    map_budget: str
    """of the zoom map, on the first task"""
    chunk: int
    """of a fixed chunk: about as many spans as the entropy rule cuts"""
    windows: tuple[float, ...]
    """of Table 7, as shares of the preset's window"""
    times: int = 1
    """prompts of a task in the tables, as a multiple of what is asked for"""
    whole: Mapping[str, Any] = field(default_factory=dict)
    """of the whole method, over the preset"""
    gate: float | None = None
    """zoom_rate of the arms that compare thresholds; None: those of the whole method are compared"""

    @property
    def where(self) -> str:
        """Of the tables: 'needle and multikey, 1024 tokens at 50%'."""
        return f"{' and '.join(self.tasks)}, {self.length} tokens at {self.budget}"


TOY = Setting(
    model="the demo model",
    trained=True,
    preset="demo",
    tasks=("needle", "multikey"),
    length=1024,
    budget="50%",
    map_length=2048,
    map_budget="10%",
    chunk=40,
    windows=(0.5, 2.0),
)
"""50 %: at smaller budgets hardly any arm answers, and no difference can be seen; 10 %: the paper's"""


def setting_of(model: str) -> Setting:
    """Of a model by its name. A model other than the toy has no trained router, and the untrained gate at its usual
    share answers nothing at any budget (docs/fidelity.md): the whole method is then the published one that expands as
    many spans as the budget holds, with factors that keep enough energy for digits."""
    if model == DEMO:
        return TOY
    return Setting(
        model=model,
        trained=False,
        preset=None,
        tasks=("niah_single",),
        times=2,
        length=1024,
        budget="50%",
        map_length=2048,
        map_budget="20%",
        chunk=24,
        windows=(0.5,),
        whole={"zoom_rate": 1.0, "energy": 0.99},
        gate=0.3,
    )


@dataclass(frozen=True)
class Whole:
    """The whole method as it is measured on a model."""

    preset: str
    params: SeKVParameters
    """the preset's, with those of the setting in their place"""
    head_dim: int

    @property
    def quarter(self) -> int:
        """The paper's largest rank in proportion: 32 of head size 128 (app. A)."""
        return min(self.params.max_rank, max(1, self.head_dim // 4))


@dataclass(frozen=True)
class Arm:
    """What an arm changes over the whole method."""

    switches: Mapping[str, Any] = field(default_factory=dict)
    limit: bool = True
    """False: run without a budget"""
    everywhere: bool = True
    """False: on as many prompts of the first task as are asked for"""


@dataclass(frozen=True)
class Part:
    """A row of Table 5: what is compared with what, and what is missing in `arm`."""

    arm: str
    missing: str
    against: str = "SeKV"


GATE, ONE = "a threshold per head", "one threshold"
FITTED, ENERGY, FACTORS = "untrained gate", "energy 0.95", "factors only"
BY_GATE, BY_BEST, ALL = "no limit, untrained gate", "no limit, best token", "no limit, every span"


def parts(setting: Setting) -> list[Part]:
    """The rows of Table 5 that can be measured as a difference between two arms."""
    zoom_in = [Part("untrained router", "the trained zoom-in")] if setting.trained else []
    against = "SeKV" if setting.gate is None else GATE
    return [
        Part("fixed chunks", "entropy-guided segmentation"),
        Part("no anchors", "anchor tokens"),
        Part("uniform means", "surprisal weights in summaries (the paper's mean pooling is the same arm here)"),
        *zoom_in,
        Part("no reconstruction", "SVD reconstruction"),
        Part(ONE, "a threshold per head", against),
    ]


def ranks(base: SeKVParameters) -> tuple[int, int]:
    """Table 7's smaller caps on the rank."""
    return base.max_rank // 4, base.max_rank // 2


def windows(setting: Setting, base: SeKVParameters) -> tuple[int, ...]:
    """Table 7's other windows, in tokens."""
    return tuple(int(base.window * share) for share in setting.windows)


def arms(setting: Setting, whole: Whole, tau: float) -> dict[str, Arm]:
    """By name, the whole method first. tau: of the arm with one threshold. alpha goes without the
    cap on anchors, which would bind at all of them."""
    base = whole.params
    chunks = {"segmentation": "chunks", "l_max": setting.chunk, "l_min": min(base.l_min, setting.chunk // 2)}
    found = {"SeKV": Arm(), "fixed chunks": Arm(chunks)}
    found["no anchors"] = Arm({"anchors": False})
    found["uniform means"] = Arm({"weights": "uniform"})
    if setting.trained:
        found["untrained router"] = Arm({"router": "pca"})
    found["no reconstruction"] = Arm({"zoom": "off"})
    if setting.gate is None:
        found[ONE] = Arm({"tau": tau})
    else:
        found |= {GATE: Arm({"zoom_rate": setting.gate}), ONE: Arm({"zoom_rate": setting.gate, "tau": tau})}
    found |= {f"R_max {rank}": Arm({"max_rank": rank}) for rank in ranks(base)}
    found |= {f"w {window}": Arm({"window": window}) for window in windows(setting, base)}
    found |= {f"alpha {alpha:g}": Arm({"alpha": alpha, "anchor_share": 1.0}) for alpha in (0.5, 1.0, 2.0)}
    return found | ({FACTORS: Arm({"form": "factors"})} if setting.trained else _untrained(whole))


def _untrained(whole: Whole) -> dict[str, Arm]:
    """Arms of a model without a trained router: the gate as it is fitted, the energy that its factors keep by default,
    all spans as factors of the paper's proportion, and, with every span exact and no budget, the same share of spans
    expanded by eq. 5 and by their best token, and all of them, which is full KV."""
    asked = {"zoom_rate": UNTRAINED_SHARE}
    exact = {**asked, "form": "raw"}
    return {
        FITTED: Arm({**asked, "energy": 0.95}),
        ENERGY: Arm({"energy": 0.95}),
        FACTORS: Arm({"form": "factors", "max_rank": whole.quarter}),
        BY_GATE: Arm(exact, limit=False, everywhere=False),
        BY_BEST: Arm({**exact, "router": "mean", "piece": 1}, limit=False, everywhere=False),
        ALL: Arm({"form": "raw"}, limit=False),
    }
