"""Races: what is asked for, and the stored race, a small file beside the runs that names the run of each lane."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvlens import methods
from kvlens.files import make_folder, read_plain, replace_plain
from kvlens.methods.differences import setting_words, varied
from kvlens.runs.frames import Frame, Maps
from kvlens.runs.memory import SHARE, attended_share
from kvlens.runs.request import DEFAULT_SHARE, RunRequest
from kvlens.store.errors import RunNotFound, TraceError, UnreadableRun, sentence
from kvlens.store.runinfo import check_uid
from kvlens.text.plaintext import json_text

FOLDER = "races"
"""of the runs' folder; too short a name to be a run's"""
MOST = 8
"""methods in a race, full KV apart"""
_MOST_BYTES = 4 << 20


class Entrant(BaseModel):
    """A method with its configuration, as `kvlens run` takes them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    preset: str | None = None
    overrides: dict[str, Any] = {}


class RaceRequest(BaseModel):
    """One prompt, several methods, one budget."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shared: RunRequest
    """what all lanes have in common; its budget is what every method is held to, its method plays no part"""
    entrants: tuple[Entrant, ...]

    def check(self) -> None:
        """Raises ValueError with one sentence for no method, too many, unknown ones and the same one twice."""
        if not self.entrants:
            raise ValueError("a race needs at least one method besides full KV.")
        if len(self.entrants) > MOST:
            raise ValueError(f"a race has at most {MOST} methods, not {len(self.entrants)}.")
        for number, entrant in enumerate(self.entrants):
            methods.get(entrant.method)
            if entrant.method == methods.REFERENCE:
                raise ValueError(f"{methods.REFERENCE} is in every race already: name what it is compared with.")
            if entrant in self.entrants[:number]:
                raise ValueError(f"{entrant.method} is named twice with the same preset and parameters.")

    @property
    def budget(self) -> str:
        """What every method is held to."""
        return DEFAULT_SHARE if self.shared.budget is None else self.shared.budget

    @property
    def reference(self) -> RunRequest:
        """Lane 0: the same prompt under full KV."""
        changes: dict[str, Any] = {
            "method": methods.REFERENCE,
            "preset": None,
            "budget": None,
            "overrides": {},
            "against": False,
        }
        return self.shared.model_copy(update=changes)

    def difference(self, entrant: Entrant, config: Mapping[str, Any] | None = None) -> str:
        """Return the parameters that tell an entrant from other entrants of its method: 'tau 0.9'; '' where no other
        has its method. config: what the entrant runs with; None: not known, what was asked for is named."""
        siblings = [each.overrides for each in self.entrants if each.method == entrant.method]
        names = varied(siblings)
        values = {name: entrant.overrides.get(name, "as usual") for name in names} if config is None else config
        return ", ".join(setting_words(name, values[name]) for name in names if name in values)

    def lanes(self) -> list[tuple[RunRequest, str | None]]:
        """Of each entrant its run, compared with full KV, and one sentence where its budget means something else. A
        method that keeps every token on the device is held to the share of the tokens it attends, where it has a
        parameter for it, as the benchmarks do."""
        return [self._lane(entrant) for entrant in self.entrants]

    def _lane(self, entrant: Entrant) -> tuple[RunRequest, str | None]:
        method, budget, wording = methods.get(entrant.method), self.budget, None
        overrides = dict(entrant.overrides)
        if method.keeps_all:
            wording = "Keeps all KV on the device and saves reading."
            if (share := attended_share(entrant.method, budget, overrides)) is not None:
                overrides[SHARE] = share
            if SHARE in overrides:
                share = methods.converted(method, {SHARE: overrides[SHARE]})[SHARE]
                wording = f"Keeps all KV on the device and attends {share * 100:.3g} % of it."
        changes = {
            "method": entrant.method,
            "preset": entrant.preset,
            "overrides": overrides,
            "budget": None if method.keeps_all else budget,
            "against": True,
        }
        return self.shared.model_copy(update=changes), wording


REFUSED = "refused"


EXPLAINING = "explaining"
"""a lane has its whole output; what a loss owes to each span is being computed"""
UNFINISHED = ("waiting", "prefill", "place", "running", EXPLAINING)
"""states of a lane that goes on"""
LANE_CUT_SHORT = "The process of this race ended before the lane did."


class Lane(BaseModel):
    """One method's part of a stored race."""

    model_config = ConfigDict(extra="ignore")

    method: str
    preset: str | None = None
    stand_in: str = ""
    """parts of the method that are untrained or uncalibrated; '': none"""
    differs: str = ""
    """parameters that tell the lane from another lane of its method ('tau 0.9'); '': no other lane has its method"""
    note: str | None = None
    """one sentence on what it runs with, where that is worth knowing"""
    state: str = "waiting"
    """waiting | prefill | place | running | explaining | completed | cancelled | failed | refused"""
    message: str | None = None
    """one sentence on why it was refused or failed"""
    uid: str | None = None
    """of its run; None: nothing was stored"""
    stored: bool = False
    """the run can be opened, and its effects are being computed"""
    text: str = ""
    """the output when it ended"""
    lost: int | None = None
    """the first step at which its most probable token was not full KV's; None: there was none"""
    right: bool | None = None
    """whether the output is the expected answer; None: none is known"""


class RaceInfo(BaseModel):
    """A stored race."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    id: str
    created: str
    model: str
    budget: str
    max_new: int = Field(ge=1)
    answer: str | None = None
    request: dict[str, Any] = {}
    """see RaceRequest"""
    sizes: dict[str, int] = {}
    """layers, kv_heads, full_kv_bytes, prompt_tokens, steps (at most), asked (steps of them that feed a question)"""
    lanes: list[Lane] = Field(min_length=1)
    """full KV first"""


def new_id() -> str:
    """Return an id that sorts by time (UTC) to the microsecond and does not collide."""
    seconds, micros = divmod(time.time_ns() // 1000, 1_000_000)
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(seconds))}-{micros:05x}{secrets.token_hex(2)}"


def write(runs_dir: Path, race: RaceInfo) -> None:
    """Replaces the race's file whole. Raises TraceError."""
    folder = runs_dir / FOLDER
    target, temporary = folder / f"{race.id}.json", folder / f".{race.id}.{os.getpid()}"
    try:
        make_folder(folder)
        replace_plain(target, temporary, race.model_dump_json(indent=1).encode("utf-8", "replace"), durable=False)
    except OSError as error:
        raise TraceError(
            f"The race {race.id} cannot be stored ({sentence(error)}); check the disk and --runs."
        ) from None


def read(runs_dir: Path, race_id: str) -> RaceInfo:
    """Return a stored race. A race is stored when it ends, so a lane that reads as unfinished has failed. Raises
    TraceError with one sentence for an id that is none, a race that is not there or cannot be read."""
    path = runs_dir / FOLDER / f"{check_uid(race_id)}.json"
    try:
        race = RaceInfo.model_validate_json(read_plain(path, _MOST_BYTES))
    except FileNotFoundError:
        raise RunNotFound(f"There is no race {race_id} in {runs_dir}.") from None
    except (OSError, ValidationError) as error:
        raise UnreadableRun(f"The race {race_id} cannot be read ({sentence(error)}).") from None
    for lane in race.lanes:
        if lane.state in UNFINISHED:
            lane.state, lane.message = "failed", lane.message or LANE_CUT_SHORT
    return race


def ids(runs_dir: Path) -> list[str]:
    """Of all stored races, newest first."""
    folder = runs_dir / FOLDER
    results = (path.stem for path in folder.glob("[0-9a-z]*.json")) if folder.is_dir() else ()
    return sorted(results, reverse=True)


# What a race says while it goes on, one JSON object per line; each begins with its phase, so that a reader can put it
# by unread.


def begun_line(race: RaceInfo) -> str:
    """All lanes are known."""
    lanes = [lane.model_dump(include={"method", "preset", "stand_in", "differs", "note"}) for lane in race.lanes]
    wording = {"id": race.id, "model": race.model, "budget": race.budget, "answer": race.answer}
    return json_text({"phase": "race", **wording, **race.sizes, "lanes": lanes})


def lane_line(number: int, lane: Lane) -> str:
    """A lane has begun, was refused, or has ended."""
    return json_text({"phase": "lane", "lane": number, **lane.model_dump()})


def frame_line(frame: Frame) -> str:
    """A step of a lane."""
    return json_text({"phase": "frame", **frame})


def maps_line(maps: Maps) -> str:
    """What is known of a step when it is measured."""
    return json_text({"phase": "maps", **maps})
