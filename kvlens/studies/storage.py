"""Stored studies: `study/<id>/` in the folder of runs, with the plan, the prompts, and one line per trial."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvlens.files import naming, read_plain, replace_plain
from kvlens.store.errors import RunNotFound, TraceError, UnreadableRun, sentence
from kvlens.store.runinfo import is_uid, new_uid, now
from kvlens.studies.earlier import rename_figures
from kvlens.studies.limits import Thresholds
from kvlens.studies.plan import StudyPlan
from kvlens.studies.promptrow import StudyPrompt, prompt_of
from kvlens.text.plaintext import plain
from kvlens.text.prompts import BadPrompt

FOLDER = "study"
"""of the folder of runs; too short a name to be a run's"""
PLAN, PROMPTS, TRIALS, LOCK = "study.json", "prompts.jsonl", "trials.jsonl", ".lock"
ATTEMPTS = 10
"""to hold a study"""
_MOST_BYTES = 256 << 20
FINAL = ("completed", "refused")
"""states of a trial that is not run again when the study goes on"""


def readings_folder(runs_dir: Path) -> Path:
    """Return where all studies of a folder of runs keep readings of prompts (kvlens.runs.readings)."""
    return runs_dir / FOLDER / ".readings"


class StudyBusy(TraceError):
    """Another process is carrying the study out."""


class StudyInfo(BaseModel):
    """What is stored of a study besides its prompts and trials."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    id: str
    created: str
    kvlens: str = ""
    fingerprint: str | None = None
    """of the model, once the first trial has been run"""
    plan: StudyPlan
    thresholds: Thresholds | None = None
    """of a gate; None: the study is none"""
    batch: int = Field(1, ge=1)
    """prompts whose decode steps are computed together, as the study was carried out last"""


@dataclass(frozen=True)
class Trial:
    """One prompt under one arm."""

    prompt: str
    """its id"""
    arm: str
    """Arm.key()"""
    state: str
    """completed | refused | failed"""
    uid: str | None = None
    """of its run; None: nothing was stored"""
    message: str | None = None
    """one sentence on why it was refused or failed"""
    figures: dict[str, Any] | None = None
    """see kvlens.studies.figures"""
    smallest_share: float | None = None
    """of full KV, that the method needs where the budget was below it"""
    origin: str | None = None
    """what made it: code, weights and settings; None: it was not asked for"""

    @property
    def ended(self) -> bool:
        """The trial is not run again when the study goes on."""
        return self.state in FINAL


def create(
    runs_dir: Path,
    plan: StudyPlan,
    prompts: Sequence[StudyPrompt],
    thresholds: Thresholds | None = None,
    study_id: str | None = None,
) -> StudyInfo:
    """Store a study that has not begun, and return it. study_id: None: a new one. Raises TraceError when it cannot be
    stored, and BadStudy `unknown_prompt` for an arm that is listed with a prompt that the study does not have."""
    from kvlens import __version__

    plan.check_listed(prompt.id for prompt in prompts)
    info = StudyInfo(id=study_id or new_uid(), created=now(), kvlens=__version__, plan=plan, thresholds=thresholds)
    folder = runs_dir / FOLDER / info.id
    try:
        folder.mkdir(parents=True, mode=0o700)
        write_prompts(folder, prompts)
        save(runs_dir, info)
    except OSError as error:
        raise TraceError(f"the study cannot be stored ({sentence(error)}): check the disk and --runs.") from None
    return info


def save(runs_dir: Path, info: StudyInfo) -> None:
    """Replace the study's plan whole."""
    folder = folder_of(runs_dir, info.id)
    _replace(folder / PLAN, info.model_dump_json(indent=1).encode("utf-8", "replace"))


def write_prompts(folder: Path, prompts: Sequence[StudyPrompt]) -> None:
    """Replace the study's prompts whole."""
    lines = (json.dumps(plain(prompt.row()), ensure_ascii=False) + "\n" for prompt in prompts)
    _replace(folder / PROMPTS, "".join(lines).encode("utf-8", "replace"))


def folder_of(runs_dir: Path, study_id: str) -> Path:
    """Return the folder of a study, which need not exist. Raises RunNotFound `no_study_id` for what is no id."""
    if not is_uid(study_id):
        raise RunNotFound(f"{str(study_id)[:80]!r} is no study id: see `kvlens studies list`.", code="no_study_id")
    return runs_dir / FOLDER / study_id


def read(runs_dir: Path, study_id: str) -> StudyInfo:
    """Return a stored study. Raises TraceError with one sentence."""
    path = folder_of(runs_dir, study_id) / PLAN
    try:
        return StudyInfo.model_validate_json(read_plain(path, _MOST_BYTES))
    except FileNotFoundError:
        raise RunNotFound(f"There is no study {study_id} in {runs_dir}.") from None
    except (OSError, ValidationError, ValueError) as error:
        raise UnreadableRun(f"The study {study_id} cannot be read ({sentence(error)}).") from None


def read_prompts(runs_dir: Path, study_id: str) -> list[StudyPrompt]:
    """Return the prompts of a study. Raises TraceError with one sentence."""
    try:
        data = read_plain(folder_of(runs_dir, study_id) / PROMPTS, _MOST_BYTES).decode("utf-8")
        rows = [json.loads(line) for line in data.split("\n") if line.strip()]
        return [prompt_of(row, str(number), f"prompt {number}") for number, row in enumerate(rows)]
    except (OSError, ValueError, RecursionError, BadPrompt) as error:
        raise UnreadableRun(f"The prompts of study {study_id} cannot be read ({sentence(error)}).") from None


def read_trials(runs_dir: Path, study_id: str) -> list[Trial]:
    """Return the newest trial of every prompt and arm, in the order in which they ended. A cut last line is none."""
    try:
        data = read_plain(folder_of(runs_dir, study_id) / TRIALS, _MOST_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UnreadableRun(f"The trials of study {study_id} cannot be read ({sentence(error)}).") from None
    trials: dict[tuple[str, str], Trial] = {}
    for line in data[: data.rfind("\n") + 1].split("\n"):
        trial = _trial(line)
        if trial is not None:
            trials.pop((trial.prompt, trial.arm), None)
            trials[trial.prompt, trial.arm] = trial
    return list(trials.values())


def append(runs_dir: Path, study_id: str, trial: Trial) -> None:
    """Add a trial; it is on the disk when this returns. Raises TraceError when it cannot be."""
    row = {name: value for name, value in vars(trial).items() if value is not None}
    line = json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n"
    path = folder_of(runs_dir, study_id) / TRIALS
    try:
        _end_line(path)
        with naming(path), path.open("a", encoding="utf-8") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise TraceError(f"the study's trial cannot be stored ({sentence(error)}): check the disk.") from None


@contextmanager
def carried_out_alone(runs_dir: Path, study_id: str) -> Iterator[None]:
    """Hold the study for this process. Raises RunNotFound, and StudyBusy where another has it; the kernel gives it back
    however the process ends."""
    folder = folder_of(runs_dir, study_id)
    if not folder.is_dir():
        raise RunNotFound(f"There is no study {study_id} in {runs_dir}.")
    with (folder / LOCK).open("a") as file:
        for attempt in range(ATTEMPTS):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if attempt + 1 == ATTEMPTS:
                    busy = f"study {study_id} is being carried out by another process: wait until it ends."
                    raise StudyBusy(busy) from None
                time.sleep(0.02)  # a page may be looking whether it runs
        yield


def is_running(runs_dir: Path, study_id: str) -> bool:
    """Return whether some process is carrying the study out."""
    try:
        with carried_out_alone(runs_dir, study_id):
            return False
    except StudyBusy:
        return True
    except (OSError, RunNotFound):
        return False


def ids(runs_dir: Path) -> list[str]:
    """Return the ids of all stored studies, newest first."""
    return sorted((path.parent.name for path in (runs_dir / FOLDER).glob(f"*/{PLAN}")), reverse=True)


def _trial(line: str) -> Trial | None:
    """The trial of a line; None for something else."""
    try:
        row = rename_figures(json.loads(line))
        trial = Trial(**{name: row[name] for name in Trial.__dataclass_fields__ if name in row})
    except (ValueError, TypeError, RecursionError):
        return None
    texts = (trial.prompt, trial.arm, trial.state)
    return trial if all(isinstance(text, str) for text in texts) and isinstance(trial.figures, dict | None) else None


def _end_line(path: Path) -> None:
    """Cut what an interruption left of a line, so that the next one begins where a line begins."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        file.seek(0, os.SEEK_END)
        size = file.tell()
        if not size:
            return
        file.seek(size - 1)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def _replace(path: Path, data: bytes) -> None:
    replace_plain(path, path.with_name(f".{path.name}.{os.getpid()}"), data, durable=True)
