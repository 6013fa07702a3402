"""What the ablation of SeKV runs: its arms, by the rows of the paper's Tables 5 and 7, and its cases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from kvlens.engine import models
from kvlens.lab.training.sekv.files import load_router
from kvlens.methods.sekv.trained import SHIPPED

CELLS = ((1024, "50%"), (2048, "20%"))
"""every arm; at these budgets answers can differ"""
SMALL_CELLS = ((1024, "20%"), (2048, "10%"))
"""the arms of SMALL_ARMS only; 1024 tokens at 10 % are infeasible with the demo preset"""
SMALL_ARMS = ("SeKV", "untrained router", "no reconstruction")
UNLIMITED = (
    "full",
    "no budget",
    "all",
    "all, R_max 8",
    "all, R_max 4",
    "all, pre-RoPE, R_max 8",
    "all, pre-RoPE, R_max 4",
)
"""arms without a budget. 'all': every span is expanded from factors, so that nothing but the reconstruction is left to
fail; long spans only, cut without anchors, since short ones have full rank"""
ALL: dict[str, Any] = {"alpha": 100.0, "tau": 0.0, "form": "factors"}
CHUNK = 40
"""tokens of a fixed chunk: about as many spans as the entropy rule cuts"""


@dataclass(frozen=True)
class Arm:
    """What is switched, and the row of the paper's tables it stands for."""

    row: str
    switches: dict[str, Any] | None
    """parameters over the demo preset; None: the full cache"""


def arms() -> dict[str, Arm]:
    """By name. Table 5's 'w/o surprisal-weighted summaries' and 'mean pooling summary' are one arm: the paper does not
    say how they differ. Table 7 is scaled: R_max to head size 32 (the paper: 8 to 64 of 128), w by halves and doubles
    of the preset's 24."""
    config = AutoConfig.from_pretrained(models.resolve("demo"))
    tau = float(load_router(SHIPPED["demo"], models.shape_of(config, 4)).threshold.sigmoid().mean())
    results = {
        "full": Arm("FullKV", None),
        "SeKV": Arm("Table 5: SeKV; Table 7: R_max 16, alpha 1, w 24", {}),
        "fixed chunks": Arm("Table 5: w/o entropy-guided segmentation", {"segmentation": "chunks", "l_max": CHUNK}),
        "no anchors": Arm("Table 5: w/o anchor tokens", {"anchors": False}),
        "uniform means": Arm("Table 5: w/o surprisal-weighted summaries; mean pooling summary", {"weights": "uniform"}),
        "untrained router": Arm("Table 5: w/o trained zoom-in", {"router": "pca"}),
        "no reconstruction": Arm("Table 5: w/o SVD reconstruction", {"zoom": "off"}),
        "one threshold": Arm("Table 5: fixed global threshold", {"tau": tau}),
    }
    results |= {f"R_max {rank}": Arm("Table 7: max rank", {"max_rank": rank}) for rank in (4, 8)}
    results["untrained, R_max 32"] = Arm(
        "Table 7: max rank (the trained gates end at 16)", {"router": "pca", "max_rank": 32}
    )
    results["alpha 2"] = Arm("Table 7: surprisal threshold (the preset's cap on anchors binds)", {"alpha": 2.0})
    results |= {
        f"alpha {alpha:g}, uncapped": Arm(
            "Table 7: surprisal threshold, no cap on anchors", {"alpha": alpha, "anchor_share": 1.0}
        )
        for alpha in (0.5, 1.0, 1.5, 2.0)
    }
    results |= {f"w {window}": Arm("Table 7: local window", {"window": window}) for window in (12, 48)}
    alone: dict[str, dict[str, Any]] = {
        "all": {},
        "all, R_max 8": {"max_rank": 8},
        "all, R_max 4": {"max_rank": 4},
        "all, pre-RoPE, R_max 8": {"max_rank": 8, "pre_rope": True},
        "all, pre-RoPE, R_max 4": {"max_rank": 4, "pre_rope": True},
    }
    return results | {
        "pre-RoPE": Arm("ours: key space", {"pre_rope": True}),
        "untrained, pre-RoPE": Arm("ours: key space", {"router": "pca", "pre_rope": True}),
        "factors only": Arm("ours: form in host memory", {"form": "factors"}),
        "exact spans": Arm("ours: form in host memory", {"form": "raw"}),
        "no budget": Arm("ours: SeKV without a limit", {}),
        **{name: Arm("ours: reconstruction alone", {**ALL, **switches}) for name, switches in alone.items()},
    }


@dataclass(frozen=True)
class Case:
    """One run of the benchmark."""

    task: str
    length: int
    budget: str
    """share of full KV, or 'none'"""
    index: int
    arm: str

    @property
    def key(self) -> str:
        return f"{self.task}/{self.length}/{self.budget}/{self.index}/{self.arm}"


def cases(tasks: list[str], prompts: int, names: list[str]) -> Iterator[Case]:
    """Prompt by prompt, so that an interrupted benchmark has whole prompts and each is read once."""
    for index in range(prompts):
        for task in tasks:
            for cell, small in zip(CELLS, SMALL_CELLS, strict=True):
                yield from (Case(task, cell[0], "none", index, name) for name in names if name in UNLIMITED)
                yield from (Case(task, *cell, index, name) for name in names if name not in UNLIMITED)
                yield from (Case(task, *small, index, name) for name in names if name in SMALL_ARMS)
