"""Runs in subprocesses: one at a time, queued, with progress. Plain Python; the pages only look at it.

The manager belongs to the server process, not to a browser session, so a job goes on when its tab is closed. A job goes
on as well when its server is killed: the next server finds it in the folder of jobs (`jobrecord`), follows it and can
cancel it."""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from kvlens.app.ui.common import joblog, jobrecord
from kvlens.app.ui.common.job import Job
from kvlens.app.ui.common.jobprocess import Environment, Left, Process, start_cold, start_process, stop
from kvlens.app.ui.common.jobrecord import JOB_FIELDS, JobRecord, name_process
from kvlens.app.ui.common.scratch import Scratch
from kvlens.app.ui.common.warm import Forked
from kvlens.runs.preparing import READINGS

Starter = Callable[[list[str], Environment, int], Process]
"""argv, environment, descriptor of the log -> the process"""
NOT_KNOWN: Mapping[str, float] = MappingProxyType({})
NEVER_BEGUN = "The server ended before this job began. Start it again."


class JobManager:
    """A queue with one worker. All public methods may be called from any thread."""

    def __init__(self, start: Starter = start_process, folder: Path | None = None) -> None:
        """folder: where jobs are recorded for the next server; None: nowhere, they are known to this one alone."""
        self._start = start
        self._jobs: dict[str, Job] = {}
        self._read_ahead: tuple[object, ...] = ()
        """`reads` of the job that read ahead last"""
        self._was_read: tuple[object, ...] = ()
        """the same of the last such job that reached its end"""
        self._lock = threading.Lock()
        self._queue: queue.Queue[str | None] = queue.Queue()
        self._processes: dict[str, Process] = {}
        """of the jobs that run; one, and those that another server left"""
        records = [] if folder is None else list(jobrecord.left_records(folder))
        self._folder = Scratch(argument for record in records if record.is_running() for argument in record.argv)
        self._records = folder
        self._server = name_process(os.getpid())
        going_jobs = self._adopt(records)
        self._worker = threading.Thread(target=self._work, args=(going_jobs,), name="kvlens-jobs", daemon=True)
        self._worker.start()

    def scratch(self, name: str, text: str) -> Path:
        """A file for a job's input, in a folder that goes when the server does."""
        return self._folder.file(name, text)

    def submit(
        self,
        argv: list[str],
        title: str,
        about: str | None = None,
        then: str | None = None,
        likely: Mapping[str, float] = NOT_KNOWN,
        reads: tuple[object, ...] = (),
        ahead: bool = False,
    ) -> str:
        """Queues a run; returns the job's id. `about`, `then`, `likely`, `reads`, `ahead`: see Job. A run that is
        queued or running already, with the same prompt and options, is not queued once more: its id is returned. A
        prompt that is read ahead for another run is given up."""
        job = Job(secrets.token_hex(4), argv, title, time.time(), about=about, then=then, likely=dict(likely))
        job.identity, job.reads, job.ahead = self._identity(argv), reads, ahead
        for reading in self._active(ahead=True):
            if reading.reads != reads:
                self.cancel(reading.id)
                self._read_ahead = ()
        if ahead:
            self._read_ahead = reads
        with self._lock:
            for queued in self._jobs.values():
                if queued.identity == job.identity and queued.state in ("queued", "running"):
                    if queued.argv != argv:
                        self._folder.forget(argv)
                    return queued.id
            self._jobs[job.id] = job
        self._record(job)
        self._queue.put(job.id)
        return job.id

    def would_read(self, reads: tuple[object, ...]) -> bool:
        """Return whether a prompt is worth reading ahead: it was not the last that was, and nobody waits for a run."""
        return reads != self._read_ahead and not self._active()

    def has_read(self, reads: tuple[object, ...]) -> bool:
        """Return whether the prompt that was read ahead last is this one, and is read to its end."""
        return reads == self._was_read == self._read_ahead

    def reads_ahead(self) -> bool:
        """Return whether a prompt is being read for a run that nobody has asked for yet."""
        return any(job.state != "cancelled" for job in self._active(ahead=True))

    def _identity(self, argv: list[str]) -> tuple[str, ...]:
        return tuple(self._folder.text_of(argument) or argument for argument in argv)

    def _active(self, ahead: bool = False) -> list[Job]:
        with self._lock:
            return [job for job in self._jobs.values() if job.active and job.ahead == ahead]

    def get(self, job_id: str) -> Job | None:
        with self._lock:
            return self._jobs.get(job_id)

    def jobs(self) -> list[Job]:
        """Newest first."""
        with self._lock:
            shown = [job for job in self._jobs.values() if not job.ahead]
        return sorted(shown, key=lambda job: job.created, reverse=True)

    def position(self, job_id: str) -> int:
        """How many queued or running jobs are before this one."""
        with self._lock:
            jobs = [job for job in self._jobs.values() if not job.ahead]
        own_rows = next((job for job in jobs if job.id == job_id), None)
        return sum(1 for job in jobs if own_rows is not None and job.active and job.created < own_rows.created)

    def cancel(self, job_id: str) -> None:
        """A queued job is dropped; a running one is asked to stop (SIGTERM), then killed after GRACE_S seconds."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None or not job.active or job.state == "cancelled":
                return
            job.state = "cancelled"
            process = self._processes.get(job_id)
            if process is None:
                job.ended = time.time()
        if process is not None:
            self._record(job)
            threading.Thread(target=stop, args=(process,), daemon=True).start()
        else:
            self._forget(job)

    def shutdown(self) -> None:
        """Stops the worker and what it runs."""
        for job in (*self.jobs(), *self._active(ahead=True)):
            self.cancel(job.id)
        self._queue.put(None)

    def _work(self, going_jobs: list[Job]) -> None:
        for going_job in going_jobs:
            self._end(going_job, self._follow(going_job, self._processes[going_job.id]))
        while (job_id := self._queue.get()) is not None:
            job = self.get(job_id)
            if job is not None and job.state == "queued":
                self._run(job)

    def _run(self, job: Job) -> None:
        job.started = time.time()
        environment = {READINGS: str(self._folder.path("readings"))}
        try:
            with self._lock, jobrecord.log_opened(self._logs, job.id) as output:
                if job.state != "queued":
                    return
                process = self._processes[job.id] = self._start(job.argv, environment, output)
                job.state = "running"
            code = self._follow(job, process)
            if isinstance(process, Forked) and not process.begun and job.state == "running":
                with jobrecord.log_opened(self._logs, job.id) as output:
                    process = self._processes[job.id] = start_cold(job.argv, environment, output)
                code = self._follow(job, process)
        except OSError as error:
            code, job.state, job.message = -1, "failed", f"The run could not be started: {error}."
        self._end(job, code)

    def _follow(self, job: Job, process: Process) -> int:
        """Reads what the process prints until it ends; its exit status. Its file names it as soon as it is there."""
        for line in joblog.follow(jobrecord.log_file(self._logs, job.id), process):
            if job.process is None and process.pid is not None:
                named = name_process(process.pid)
                job.process = named if process.poll() is None else None  # asked later: the name is of this process
                self._record(job)
            if line is not None:
                joblog.read_line(job, line)
                if job.ahead and job.phase == "reference" and 2 * job.done < job.total and self._active():
                    self.cancel(job.id)  # the prompt is read; the run that waits shows full KV's answer as it comes
        return process.wait()

    def _end(self, job: Job, code: int) -> None:
        with self._lock:
            self._processes.pop(job.id, None)
            job.ended = time.time()
            if job.state == "running":
                job.state = "done" if code == 0 and (job.uid or job.study or job.ahead) else "failed"
                if job.state == "failed" and job.message is None:
                    job.message = joblog.why(code)
            if job.ahead and job.state == "done":
                self._was_read = job.reads
            joblog.close_lanes(job)
        self._forget(job)

    # ------------------------------------------------------------------------------------- what outlives the server
    @property
    def _logs(self) -> Path:
        """The folder of logs: that of the records, unless it cannot be written."""
        writable = self._records is not None and joblog.can_write(self._records)
        return self._records if writable and self._records is not None else self._folder.path("logs")

    def _record(self, job: Job) -> None:
        """Keeps for the next server what has to be known of a job."""
        if self._records is not None and not job.ahead:
            fields = {name: getattr(job, name) for name in JOB_FIELDS}
            record = JobRecord(**fields, cancelled=job.state == "cancelled", server=self._server)
            jobrecord.write_record(self._records, record)

    def _forget(self, job: Job) -> None:
        if job.ahead:
            self._jobs.pop(job.id, None)
        self._folder.forget(job.argv)
        jobrecord.forget_record(self._logs, job.id)
        if self._records is not None:
            jobrecord.forget_record(self._records, job.id)

    def _adopt(self, records: list[JobRecord]) -> list[Job]:
        """Takes over the jobs of servers that are gone -> those that still run. The others have ended."""
        going = []
        for record in records:
            fields = {name: getattr(record, name) for name in JOB_FIELDS}
            job = self._jobs[record.id] = Job(**fields, state="cancelled" if record.cancelled else "running")
            job.identity = tuple(job.argv)
            if record.process is None:
                job.message = None if record.cancelled else NEVER_BEGUN
                self._end(job, -1)
                continue
            process = self._processes[job.id] = Left(record.process.pid, record.process.start_stamp)
            self._record(job)
            if process.poll() is None:
                going.append(job)
                if record.cancelled:
                    threading.Thread(target=stop, args=(process,), daemon=True).start()
            else:
                self._end(job, self._follow(job, process))
        return going
