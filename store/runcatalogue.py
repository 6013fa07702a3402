"""The catalogue of a folder of runs: what run.json, about.json and the trace of each say, read once.

`.catalogue.jsonl` in the folder holds one line per run that was read, the newest last; a line counts while the files it
was read from are as they were. Lines are appended as runs are read, so a process that is killed loses one line at most.
A damaged line is passed over, and the file may be deleted at any time. What could not be read is no line: a later
version of kvlens may read it."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvlens.collecting import uncollected
from kvlens.files import FILE_MODE, PLAIN, read_plain, write_plain
from kvlens.store.catalogueentry import Entry, Stamp, entry_line, parse_line
from kvlens.store.errors import TraceError
from kvlens.store.outcomefacts import OutcomeFacts
from kvlens.store.runinfo import check_uid

FILE = ".catalogue.jsonl"
_MOST_BYTES = 1 << 30
_BATCH = 256
"""lines that are appended at once"""


class Catalogue:
    """The runs of one folder. May be used from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.RLock()
        self._entries: dict[str, Entry] = {}
        self._lines, self._end = 0, (0, 0)

    def entries(self, read: Callable[[Path], tuple[dict[str, Any], Any]]) -> list[Entry]:
        """Return the entries of all runs in the folder. read(folder): the row of a run that is not known, or has
        changed, and its facts if its run.json holds them, with the stamp of their trace."""
        with self._lock, uncollected():
            self._refresh()
            present, news = {}, []
            for uid, stamp in _runs(self.folder):
                entry = self._entries.get(uid)
                if entry is None or entry.stamp != stamp:
                    row, facts = read(self.folder / uid)
                    trace, outcome = facts or (None, None)
                    previous = entry if outcome is None and entry is not None else None
                    entry = Entry(stamp, row, trace, outcome)
                    if previous is not None:
                        entry = replace(entry, trace=previous.trace, facts=previous.facts, problem=previous.problem)
                    self._entries[uid] = entry
                    news.append(uid)
                present[uid] = entry
                if len(news) == _BATCH:
                    self._append(news)
                    news = []
            self._append(news)
            self._entries = present
            if self._lines > 2 * len(present) + _BATCH:
                self._compact()
            return list(present.values())

    def entry(self, uid: str) -> Entry | None:
        """Return the entry of a run as it was last read; None for a run that is not known."""
        return self._entries.get(uid)

    def keep(self, uid: str, trace: tuple[int, int], facts: OutcomeFacts | None, problem: str) -> None:
        """Keep what was read of a run's trace. A run that is not known is passed over."""
        with self._lock:
            entry = self._entries.get(uid)
            if entry is not None:
                self._entries[uid] = replace(entry, trace=trace, facts=facts, problem=problem)
                if facts is not None:
                    self._append([uid])

    def _refresh(self) -> None:
        """Read the lines that were added since the last look; all of them if the file is another one."""
        path = self.folder / FILE
        try:
            status = os.lstat(path)
        except OSError:
            return
        inode, end = self._end
        if (status.st_ino, status.st_size) == (inode, end):
            return
        if status.st_ino != inode or status.st_size < end:
            self._lines, end = 0, 0
        try:
            content = read_plain(path, _MOST_BYTES)
        except OSError:
            return
        self._end = status.st_ino, len(content)
        for line in content[end:].splitlines():
            self._lines += 1
            with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
                uid, entry = parse_line(line)
                self._entries[uid] = entry

    def _append(self, uids: list[str]) -> None:
        """Append the lines of runs; a folder that cannot be written is left as it is."""
        lines = [entry_line(uid, self._entries[uid]) for uid in uids if self._entries[uid].was_read]
        if not lines:
            return
        text = b"".join(lines)
        with contextlib.suppress(OSError):
            path = self.folder / FILE
            if path.is_symlink():
                path.unlink()
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | PLAIN, FILE_MODE)
            try:
                status = os.fstat(fd)
                if stat.S_ISREG(status.st_mode):
                    os.write(fd, b"\n" + text)  # after half a line of a process that was killed
                    self._lines += len(lines)
                    if (status.st_ino, status.st_size) == self._end or not status.st_size:
                        self._end = status.st_ino, status.st_size + len(text) + 1
            finally:
                os.close(fd)

    def _compact(self) -> None:
        """Replace the file by one line per run."""
        temporary = self.folder / f"{FILE}.{os.getpid()}.{secrets.token_hex(4)}"
        with contextlib.suppress(OSError):
            lines = [entry_line(uid, entry) for uid, entry in self._entries.items() if entry.was_read]
            write_plain(temporary, b"".join(lines), durable=False)
            os.replace(temporary, self.folder / FILE)
            status = os.lstat(self.folder / FILE)
            self._lines, self._end = len(lines), (status.st_ino, status.st_size)


@lru_cache(maxsize=4)
def _catalogue(folder: str, _inode: int) -> Catalogue:
    return Catalogue(Path(folder))


def catalogue_of(folder: Path) -> Catalogue:
    """Return the catalogue of a folder that this process uses."""
    try:
        inode = folder.stat().st_ino
    except OSError:
        inode = 0
    return _catalogue(str(folder.absolute()), inode)


def _runs(root: Path) -> Iterator[tuple[str, Stamp]]:
    """Yield the run ids of a folder with the stamps of their files."""
    try:
        items = list(os.scandir(root))
    except OSError:
        return
    for item in items:
        with contextlib.suppress(TraceError, OSError):
            check_uid(item.name)
            if item.is_dir():
                yield item.name, (*_stamp(f"{item.path}/run.json"), *_stamp(f"{item.path}/about.json"))


def _stamp(path: str) -> Stamp:
    try:
        status = os.lstat(path)
    except OSError:
        return (-1,)
    return status.st_mtime_ns, status.st_size, status.st_ino
