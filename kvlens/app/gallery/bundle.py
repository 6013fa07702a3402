"""Runs in one file, to be handed on: a tar archive under xz that holds run.json, prompt.txt and trace.duckdb of each,
about.json where it has a name, a note or tags, and ledger.json where its loss ledger was measured.

Taking runs in trusts nothing that comes with them: only these names are unpacked, as ordinary files of a bounded size,
into a folder beside the runs; each trace is then opened behind the reader's walls and read from end to end, and only
then do the runs stand where runs stand.
"""

from __future__ import annotations

import io
import json
import lzma
import os
import shutil
import tarfile
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import duckdb
import pyarrow as pa

from kvlens.files import make_folder, open_file
from kvlens.ledger.storage import FILE as LEDGER
from kvlens.ledger.storage import stored_ledger
from kvlens.store.about import FILE as ABOUT
from kvlens.store.about import About, read_about
from kvlens.store.attach import unreadable
from kvlens.store.errors import TraceError, UnreadableRun, sentence
from kvlens.store.guarded import quoted
from kvlens.store.reader import TraceReader
from kvlens.store.runinfo import check_uid, freeze, read_info, run_dir
from kvlens.store.schema import TABLES
from kvlens.store.versions import tables_of

FILES = ("run.json", "prompt.txt", "trace.duckdb")
MOST_BYTES = 1 << 30
"""of all files together, unpacked"""
_CHUNK = 1 << 20


def hand_on(runs_dir: Path, left_out: Mapping[str, Sequence[str]], out: Path) -> None:
    """Writes runs into the file `out`, the same bytes for the same runs.

    left_out: uid -> tables of its trace whose rows stay behind; the trace says so of itself (meta `left_out`). Raises
    TraceError with one sentence for a run that cannot be read."""
    whole = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=whole, mode="w") as archive:
        for uid, tables in left_out.items():
            source, trace = run_dir(runs_dir, uid), Path(folder) / f"{uid}.duckdb"
            with TraceReader.open(runs_dir, uid) as reader:  # it can be read
                held = tables_of(reader.meta.schema_version, TABLES)
            _copy(source / "trace.duckdb", trace, held, tables)
            info = read_info(source)
            kept_tokens = {name: value for name, value in info.items() if name not in ("pid", "facts")} | {
                "disk_bytes": trace.stat().st_size
            }
            _add(archive, f"{uid}/run.json", json.dumps(kept_tokens, ensure_ascii=False, indent=1).encode())
            _add(archive, f"{uid}/prompt.txt", (source / "prompt.txt").read_bytes())
            _add(archive, f"{uid}/trace.duckdb", trace.read_bytes())
            if (wording := read_about(source)) != About():
                _add(archive, f"{uid}/{ABOUT}", wording.model_dump_json(indent=1).encode())
            if stored_ledger(runs_dir, uid) is not None:
                _add(archive, f"{uid}/{LEDGER}", (source / LEDGER).read_bytes())
    out.write_bytes(lzma.compress(whole.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def _copy(source: Path, target: Path, held: Collection[str], left_out: Sequence[str]) -> None:
    """A trace that holds the tables `held`, without the rows of some, in a file of its own without holes."""
    with duckdb.connect(config={"threads": "1"}) as con:
        con.execute(f"ATTACH {quoted(str(source))} AS old (READ_ONLY)")
        con.execute(f"ATTACH {quoted(str(target))} AS new (BLOCK_SIZE 16384)")
        con.execute("COPY FROM DATABASE old TO new (SCHEMA)")
        for name in sorted(held):
            if name not in left_out:
                con.execute(f"INSERT INTO new.main.{name} SELECT * FROM old.main.{name}")
        if left_out:
            con.execute("INSERT INTO new.main.meta VALUES ('left_out', ?)", [json.dumps(sorted(left_out))])
        con.execute("DETACH new")


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    about = tarfile.TarInfo(name)
    about.size, about.mode = len(data), 0o644
    archive.addfile(about, io.BytesIO(data))


def take_in(file: Path, runs_dir: Path, uids: Sequence[str]) -> None:
    """Unpacks the runs `uids` of a file, all of it or nothing; a run that is there already stays as it is.

    Raises TraceError with one sentence for a file that is not what `hand_on` writes, lacks one of the runs, holds a
    trace that cannot be read to its end, or a run that did not pass its own checks."""
    try:
        make_folder(runs_dir)
        with tempfile.TemporaryDirectory(prefix=".taken-", dir=runs_dir) as temporary:
            folder = Path(temporary)
            _unpack(file, folder, [check_uid(uid) for uid in uids])
            for uid in uids:
                _read_through(folder, uid)
                freeze(folder / uid)
            placed: list[str] = []
            try:
                for uid in uids:
                    if _put(folder / uid, runs_dir / uid):
                        placed.append(uid)
            except OSError:
                for uid in placed:
                    os.rename(runs_dir / uid, folder / uid)
                raise
    except (OSError, lzma.LZMAError, tarfile.TarError, EOFError) as error:
        raise TraceError(
            f"The runs in {file.name} cannot be taken in ({sentence(error)}); restore the file from a copy, or make "
            f"room in the folder of runs.",
            code="bundle_unreadable",
        ) from error


def _put(source: Path, target: Path) -> bool:
    """False: it is there already."""
    try:
        os.rename(source, target)
    except OSError:
        if not target.is_dir():
            raise
        return False
    return True


def _unpack(file: Path, folder: Path, uids: Sequence[str]) -> None:
    may = {f"{uid}/{name}" for uid in uids for name in (ABOUT, LEDGER)}
    desired = {f"{uid}/{name}" for uid in uids for name in FILES} | may
    remaining = MOST_BYTES
    with tarfile.open(file, "r:xz") as archive:
        for member in archive:
            remaining -= abs(member.size)
            if member.name not in desired or not member.isreg() or member.size < 0 or remaining < 0:
                raise UnreadableRun(
                    f"{file.name} holds {member.name[:80]!r} ({member.size:,} bytes), which is no part of its runs; "
                    f"nothing of it was taken in.",
                    code="bundle_foreign_file",
                )
            desired.remove(member.name)
            source = archive.extractfile(member)
            assert source is not None
            target = folder / member.name
            make_folder(target.parent)
            with open(open_file(target, os.O_EXCL), "wb") as out:
                shutil.copyfileobj(source, out, _CHUNK)
    if lacking := desired - may:
        raise UnreadableRun(f"{file.name} lacks {min(lacking)}; restore the file from a copy.")


def _read_through(folder: Path, uid: str) -> None:
    """Every row of every table of a run, once; its own checks, and that it is the run its name says; what is said of
    it."""
    read_about(folder / uid)
    if (folder / uid / LEDGER).exists() and stored_ledger(folder, uid) is None:
        raise UnreadableRun(f"The loss ledger of run {uid} cannot be read; nothing was taken in.")
    with TraceReader.open(folder, uid) as reader:
        try:
            for name in sorted(tables_of(reader.meta.schema_version, TABLES)):
                for _ in reader.batches(f"SELECT * FROM run.main.{name}"):
                    pass
        except (duckdb.Error, pa.ArrowException) as error:
            raise unreadable(uid, error) from error
        checks = reader.self_checks()
        if reader.meta.run_uid != uid or reader.status != "completed":
            raise UnreadableRun(
                f"Run {uid} is not the whole run that its name says; nothing was taken in.",
                code="bundle_other_run",
                uid=uid,
            )
        if not len(checks) or not checks["passed"].all():
            raise UnreadableRun(
                f"Run {uid} did not pass its own checks; nothing was taken in.", code="bundle_check_failed", uid=uid
            )
