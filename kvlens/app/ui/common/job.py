"""One requested run on its way: what the pages show of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvlens.app.ui.common.jobrecord import ProcessName

LOG_LINES = 60


@dataclass
class Job:
    """One requested run. `state`: queued | running | done | failed | cancelled."""

    id: str
    argv: list[str]
    title: str
    created: float
    """seconds since the epoch"""
    state: str = "queued"
    phase: str = ""
    """convert | load | check | reference | prefill | place | decode | surprisal | effect | again | search | store,
    as the run reports it; of a study: trial"""
    done: int = 0
    total: int = 0
    """tokens (prefill, surprisal), steps (decode)"""
    tokens_per_s: float | None = None
    uid: str | None = None
    """of the stored run, once there is one; of a race that of full KV"""
    stored: str | None = None
    """uid of the run that can be opened while the job computes its effects"""
    race: str | None = None
    """id of the stored race, once it has ended"""
    study: str | None = None
    """id of the stored study, once it is there"""
    lines: list[str] = field(default_factory=list)
    """what a race says of its lanes, as it says it; only grows"""
    message: str | None = None
    """one sentence on why it failed"""
    would_do: dict[str, str] = field(default_factory=dict)
    """options of `kvlens run`, without dashes, and values that would have it run; {} where none is known"""
    note: str | None = None
    """one sentence on which parameters it runs with, where that is worth knowing"""
    about: str | None = None
    """uid of the stored run that this one repeats"""
    then: str | None = None
    """page that opens by itself when the run is done, for whoever watched it"""
    started: float | None = None
    ended: float | None = None
    likely: dict[str, float] = field(default_factory=dict)
    """seconds that each phase will likely take, see kvlens.app.ui.common.likely; {} where no run tells"""
    phase_began: float | None = None
    """when the phase began"""
    lost: bool = False
    """a single run has left full KV"""
    process: ProcessName | None = None
    """once it has begun"""
    identity: tuple[str, ...] = ()
    """argv with the content of its prompt file in place of the file: what the run is known by"""
    reads: tuple[object, ...] = ()
    """what decides the reading of its prompt (kvlens.app.ui.common.readahead); (): not known"""
    ahead: bool = False
    """it reads a prompt for a run that nobody has asked for yet, and no list shows it"""
    log: deque[str] = field(default_factory=lambda: deque(maxlen=LOG_LINES))

    @property
    def active(self) -> bool:
        """Queued, running, or asked to stop and not yet gone."""
        return self.ended is None
