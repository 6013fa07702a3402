"""The thresholds of a gate: how much an arm of a study may differ from full KV, judged on the same prompts."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvlens.studies.earlier import rename_earlier

SHARES = ("lost", "changed", "group_lost")
"""thresholds that are shares of prompts, between 0 and 1"""


class Thresholds(BaseModel):
    """The most that an arm may differ from full KV. None: not judged."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lost: float | None = Field(None, gt=0, lt=1)
    """share of right answers lost, full KV minus arm: the upper end of Tango's paired 95 % interval"""
    changed: float | None = Field(None, gt=0, lt=1)
    """share of outputs that are not full KV's: the upper end of Wilson's 95 % interval"""
    kl_mean_nats: float | None = Field(None, gt=0)
    """KL(full KV || arm), mean over the prompts: the upper end of Student's 95 % interval"""
    group_lost: float | None = Field(None, gt=0, lt=1)
    """share of right answers lost in the worst group of prompts, as counted: groups are small"""

    @model_validator(mode="before")
    @classmethod
    def _rename_earlier(cls, values: Any) -> Any:
        return rename_earlier(values) if isinstance(values, dict) else values

    @property
    def limits(self) -> dict[str, float]:
        """Name -> limit, of those that are set."""
        return {name: limit for name, limit in self.model_dump().items() if limit is not None}
