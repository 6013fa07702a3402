"""Which rates of SentKVCompress's decisions are recorded."""

from __future__ import annotations

from kvlens.lab.bench.rates import Arm

ARMS = {"sentkv": Arm("sentkv", ("reuse",))}
