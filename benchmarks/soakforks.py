"""Work in a process of its own, forked, so that a crash and a hang are outcomes like others."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable

from kvlens.store.errors import TraceError

LONGEST_S = 60.0
"""an attempt that takes longer hangs"""


def forked(
    work: Callable[[], object], kill_after_s: float | None = None, longest_s: float = LONGEST_S
) -> tuple[str, str]:
    """`work` in a process of its own -> (outcome, what it printed). Outcomes: 'done', 'refused' (a ValueError or
    TraceError of one sentence), 'killed' as asked, 'crash', 'hang' (it took longer than `longest_s`)."""
    with tempfile.TemporaryFile() as sentence:
        child = os.fork()
        if not child:
            os.dup2(sentence.fileno(), 1)
            os.dup2(sentence.fileno(), 2)
            _work(work)
        until = time.monotonic() + (longest_s if kill_after_s is None else kill_after_s)
        status = None
        while status is None and time.monotonic() < until:
            ended, code = os.waitpid(child, os.WNOHANG)
            status = code if ended else None
            time.sleep(0.001)
        outcome = "killed" if kill_after_s is not None else "hang"
        if status is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        else:
            outcome = {0: "done", 3: "refused"}.get(os.waitstatus_to_exitcode(status), "crash")
        sentence.seek(0)
        return outcome, sentence.read().decode("utf-8", "replace")


def _work(work: Callable[[], object]) -> None:
    code = 4
    try:
        results = work()
        print("" if results is None else results, flush=True)
        code = 0
    except (TraceError, ValueError) as error:
        print(error, flush=True)
        code = 3 if "\n" not in str(error) and str(error).endswith(".") else 4
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        os._exit(code)
