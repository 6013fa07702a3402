"""What a method asks of the memory: where tokens go when prefill ends or a block leaves the window, and what a step attends."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvlens.memory.cold import Codec
from kvlens.spans import Span


@dataclass
class Placement:
    """Where the tokens of a position range go. Every position of the range is in exactly one span or, at the end of prefill, in
    the window. The spans get their ids from the memory, in this order; the lists below index into them.
    """

    spans: list[Span]
    states: list[str]
    """state of each span, one of kvlens.rows.SPAN_STATES"""
    kept: torch.Tensor
    """positions that stay on the device at full resolution [m], or [L, H_kv, m] where KV heads keep different tokens"""
    kept_role: str | torch.Tensor
    """a name of kvlens.rows.ROLES for all of them, or their codes, shaped like `kept`"""
    coarse: list[int] = field(default_factory=list)
    """spans that get a coarse entry"""
    coarse_keys: torch.Tensor | None = None
    """[L, H_kv, len(coarse), D]"""
    coarse_values: torch.Tensor | None = None
    offload: list[int] = field(default_factory=list)
    """spans whose tokens go to the cold tier through `codec`"""
    codec: Codec | None = None
    span_of_kept: torch.Tensor | None = None
    """index into `spans` for each kept token; None: looked up from the spans' ranges"""


@dataclass
class Selection:
    """What the query heads of one layer attend beyond kept tokens and window. Tables of fixed width: S span ids.

    fine [H_kv, G, S] bool: this query head reads the span token by token if it is hot, through its coarse entry otherwise.
    want [H_kv, W] int64: spans to be brought to the device, highest priority first, -1 = none.
    later: True moves them after this step's attention, to be used from the next step on.
    score [H_kv, G, S]: for the log; NaN where there is none.
    zoomable [S] bool: spans that could be expanded (the denominator of the zoom rate).
    """

    fine: torch.Tensor
    want: torch.Tensor
    zoomable: torch.Tensor
    cause: str = "zoom"
    later: bool = False
    score: torch.Tensor | None = None
