"""Which rates of SeKV's decisions are recorded."""

from __future__ import annotations

from kvlens.lab.bench.rates import Arm

ARMS = {"sekv": Arm("sekv", ("miss", "zoom"))}
