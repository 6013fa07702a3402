"""Which rates of FreeKV's decisions are recorded. Blocking recall is FreeKV that corrects every head at every step."""

from __future__ import annotations

from kvlens.lab.bench.rates import Arm

ARMS = {"freekv": Arm("freekv", ("miss", "correction")), "blocking": Arm("freekv", ("miss",), {"tau": 1.0})}
