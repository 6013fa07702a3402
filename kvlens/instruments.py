"""What the instruments beside a step say of it: how the method ranked spans and tokens, what full attention would have
read, what the next token's distribution lost, how much of that is due to what was not read, and the mean keys that show
how spans lie to each other. Part of the contract of ``rows.py``; NaN means 'not recorded'. And the clock that times the
phases of a step on the engine's thread, so that a step's duration can be read as a sum.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class CutRow:
    """A ranking of tokens by which some were dropped for good, and where what is gone stood in it. One entry per span
    that lost tokens."""

    step: int
    """-1: at the end of prefill"""
    layer: int | None
    """None: alike in all layers"""
    kv_head: int | None
    """None: alike for all KV heads"""
    candidates: int
    """tokens that were ranked"""
    kept: int
    """of these, how many stayed"""
    cut: float
    """lowest score that stayed, on the method's own scale; NaN: none stayed, or it ranks nothing"""
    span: np.ndarray
    """int32 [s]"""
    dropped: np.ndarray
    """int32 [s]: ranked tokens of the span that are gone by this row"""
    pos: np.ndarray
    """int32 [s]: position of the best of them"""
    rank: np.ndarray
    """int32 [s]: its rank, 1 = best"""
    score: np.ndarray
    """float32 [s]: its score; NaN: none"""


@dataclass
class Scores:
    """How a method ranked spans at one step: per (layer, KV head) its N best candidates, best first."""

    span: np.ndarray
    """int32 [L, H_kv, N], -1 = none"""
    score: np.ndarray
    """float32 [L, H_kv, N], the method's own scale"""
    chosen: np.ndarray
    """bool [L, H_kv, N]: wanted on the device"""
    candidates: np.ndarray
    """int32 [L, H_kv]: how many spans were ranked"""


@dataclass(frozen=True)
class Loss:
    """What a step's next-token distribution lost against full KV in the very same context. Logarithms are natural
    (nats).

    Recorded while every token before this one is the reference's: always when the run is forced, up to and including
    the first divergence when it is free.
    """

    ref_token: int
    """what the full-KV reference chose at this step"""
    ref_text: str
    top_token: int
    """the most probable token under the method"""
    top_text: str
    agrees: bool
    """full KV and the method have the same most probable token"""
    kl: float
    """KL(full || method), nats"""
    ref_logprob: float
    """of ref_token under full KV"""
    logprob: float
    """of ref_token under the method"""
    logit_diff: float
    """logit of ref_token under the method minus that under full KV"""
    ref_rank: int
    """place of ref_token under the method, 0 = most probable"""


_LEAST_MASS = 1e-12


@dataclass
class Oracle:
    """What full attention gives each span at one step: by this run's own query over the exact keys of every position so
    far, and, where a reference was given, what full KV itself gives. Full KV is fed the run's own tokens, so up to the
    divergence that is the reference's own run. The K spans of each query head with most of either, most first."""

    span: np.ndarray
    """int32 [L, Hq, K], -1 = none; all -1 in layers that were not sampled at this step"""
    full: np.ndarray
    """float32 [L, Hq, K]: own-query mass on the span"""
    mass: np.ndarray
    """float32 [L, Hq, K]: the method's mass on the same span, its coarse entry included"""
    tail_full: np.ndarray
    """float32 [L, Hq]: own-query mass on the spans that are not listed; NaN in layers that were not sampled"""
    unread: np.ndarray | None = None
    """float32 [L, Hq, K]: of `full`, the mass on tokens of the span that the query head attended in no form: not
    exactly, not rebuilt, not through the span's summary. Unlike full - mass it does not shrink when the span's other
    tokens get more than full attention gives them. None: not recorded"""
    lost_pos: np.ndarray | None = None
    """int32 [L, Hq, M]: the positions with most unread own-query mass, of any span, most first; -1 = none"""
    lost_mass: np.ndarray | None = None
    """float32 [L, Hq, M]: own-query mass on each"""
    reference: np.ndarray | None = None
    """float32 [L, Hq, K]: full KV's own mass on the span. None, as the four below: not recorded"""
    tail_reference: np.ndarray | None = None
    """float32 [L, Hq]: full KV's own mass on the spans that are not listed; NaN in layers that were not sampled"""
    reference_unread: np.ndarray | None = None
    """float32 [L, Hq, K]: of `reference`, the mass on tokens of the span that the query head attended in no form"""
    reference_lost_pos: np.ndarray | None = None
    """int32 [L, Hq, M]: the positions with most of full KV's mass unread, of any span, most first; -1 = none"""
    reference_lost_mass: np.ndarray | None = None
    """float32 [L, Hq, M]: full KV's own mass on each"""

    @property
    def wanted_mass(self) -> np.ndarray:
        """float32 [L, Hq, K]: full KV's own mass where it was recorded, else the own-query mass."""
        return self.full if self.reference is None else self.reference

    @property
    def wanted_unread(self) -> np.ndarray | None:
        """float32 [L, Hq, K]: of `wanted_mass`, the mass on tokens attended in no form; None: not recorded."""
        return self.unread if self.reference is None else self.reference_unread

    @property
    def unread_share(self) -> np.ndarray:
        """float64 [L, Hq, K], 0..1: which share of the span the query head did not read as full attention does: of
        `wanted_mass` what lies on tokens attended in no form, or, where more, of the own-query mass what the method's
        lacks. A query that has drifted from full KV's is no part of it."""
        own_query = self.full.astype(np.float64)
        share = np.maximum(0.0, own_query - self.mass) / np.maximum(own_query, _LEAST_MASS)
        if self.wanted_unread is not None:
            share = np.maximum(share, self.wanted_unread / np.maximum(self.wanted_mass, _LEAST_MASS))
        return np.minimum(1.0, share)

    @property
    def regret(self) -> np.ndarray:
        """float64 [L, Hq, K]: `wanted_mass` minus the method's mass, where positive, and at most the share of
        `wanted_mass` that was not read."""
        full = self.wanted_mass.astype(np.float64)
        return np.minimum(np.maximum(0.0, full - self.mass), full * self.unread_share)


KEY_FORMS = ("pre-rope", "post-rope")
"""the rotary embedding was taken back before keys were averaged; it could not be"""


@dataclass(frozen=True)
class SpanKeys:
    """Mean key of every prompt span, for looking at how spans lie to each other."""

    form: str
    """of KEY_FORMS"""
    span: np.ndarray
    """int32 [S]"""
    keys: np.ndarray
    """float32 [L, H_kv, S, D]"""


MOST_EFFECT_STEPS = 64
"""steps that effects are added over. Where more steps were lost, half of these end with the first lost one and half
lie behind it. What a span did through the keys and values of earlier steps is not counted"""
MOST_KEY_BYTES = 256 << 20
"""bytes of mean span keys that a trace holds at most; a run whose spans need more records none"""


def span_key_bytes(layers: int, kv_heads: int, spans: int, head_dim: int) -> int:
    """Bytes that the mean keys of so many spans take, as float32."""
    return 4 * layers * kv_heads * spans * head_dim


@dataclass(frozen=True)
class Effects:
    """What the choices of lost steps owe to what was not read: (layer, KV head, span), most important first
    (kvlens.engine.effect, kvlens.engine.ranking)."""

    step: int
    """the first lost step"""
    lead: float
    """logits: of full KV's token above the method's, under full KV, added over `steps`"""
    layer: np.ndarray
    """int32 [K]"""
    kv_head: np.ndarray
    """int32 [K]"""
    span: np.ndarray
    """int32 [K]"""
    effect: np.ndarray
    """float32 [K], logits, > 0: the span's part of what the leads lose without all that was not read"""
    steps: tuple[int, ...] = ()
    """the lost steps over which effects are added; empty: `step` alone"""

    @property
    def order(self) -> tuple[tuple[int, int, int], ...]:
        """The triples (layer, KV head, span), most important first."""
        return tuple(zip(self.layer.tolist(), self.kv_head.tolist(), self.span.tolist(), strict=True))


#: score: the method chooses what to read, and takes note of the step's token; plan: the memory fits the choice into its
#: room and drops or moves what a step leaves behind; copy: copies are begun and their slots named; wait: the engine
#: stands still for a copy; attend: attention over the chosen slots; record: tensors are copied for the record.
PHASES = ("score", "plan", "copy", "wait", "attend", "record")
REST = "rest"
"""all else: the model's own layers, and the choice of the next token"""


class NoClock:
    """Times nothing: a run that is not recorded, or without phases."""

    def enter(self, phase: str) -> str:
        """Begin a phase; return the one that ends."""
        return phase

    def take(self, step_ns: int) -> dict[str, int] | None:
        """Return the microseconds in each phase of a step that took `step_ns`, together its duration, and begin anew.
        None: not timed."""
        return None


class PhaseClock(NoClock):
    """Owns the time spent per phase since the last step ended. Entering a phase costs about half a microsecond."""

    def __init__(self) -> None:
        self._phase, self._since_ns = REST, time.perf_counter_ns()
        self._spent_ns = dict.fromkeys((*PHASES, REST), 0)

    def enter(self, phase: str) -> str:
        previous, now_ns = self._phase, time.perf_counter_ns()
        self._spent_ns[previous] += now_ns - self._since_ns
        self._phase, self._since_ns = phase, now_ns
        return previous

    def take(self, step_ns: int) -> dict[str, int]:
        self.enter(REST)
        spent = {phase: self._spent_ns[phase] // 1000 for phase in PHASES}
        self._spent_ns = dict.fromkeys((*PHASES, REST), 0)
        return spent | {REST: max(0, step_ns // 1000 - sum(spent.values()))}
