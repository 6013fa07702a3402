"""How a command ends that cannot do what was asked: one sentence on stderr, exit status 1, never a traceback."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from pydantic import ValidationError

from kvlens.cli.options import fail
from kvlens.storeys import missing_extra
from kvlens.text.failures import DEBUG, debugging, file_failed, unexpected

FLAG = "--debug"
REMEDY = f"this is a fault of kvlens: run the command with {FLAG} and report what it prints"


def option_of(field: str) -> str:
    """Return the option that sets a field of a run: '--max-new' of 'max_new'."""
    return f"--{field.replace('_', '-')}" if field.isidentifier() else field


def take_debug_flag(arguments: list[str]) -> list[str]:
    """Return the arguments without `--debug`, wherever it is in front of `--`, and note it for this process and those
    it starts."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if FLAG not in arguments[:end]:
        return arguments
    os.environ[DEBUG] = "1"
    return [word for word in arguments[:end] if word != FLAG] + arguments[end:]


def run_command(command: Callable[[], object]) -> None:
    """Run a command. Every error becomes one sentence and exit status 1; with `--debug` the trace is printed first. A
    command that a signal has stopped ends with 128 and the signal's number (kvlens.runs.stopping)."""
    from kvlens.runs.stopping import exit_status

    sys.argv[1:] = take_debug_flag(sys.argv[1:])
    try:
        _run_or_fail(command)
    except SystemExit as ended:
        raise SystemExit(exit_status(ended.code) if isinstance(ended.code, int) else ended.code) from None


def _run_or_fail(command: Callable[[], object]) -> None:
    from kvlens.store.errors import TraceError

    try:
        command()
    except Exception as error:
        if debugging():
            traceback.print_exc()
        if isinstance(error, ValidationError):
            from kvlens.text.fieldrules import fault_sentence

            fail(f"{fault_sentence(error, option_of if error.title == 'RunRequest' else str)}.")
        if isinstance(error, OSError):
            fail(file_failed(error))
        if isinstance(error, ValueError | TraceError):
            fail(str(error))
        if isinstance(error, ModuleNotFoundError) and (extra := missing_extra(error)) is not None:
            fail(str(extra))
        if lack := _shortage(error):
            fail(lack)
        fail(unexpected(error, REMEDY))


def _shortage(error: Exception) -> str | None:
    """Return the sentence for an error of a machine that lacks something; None for any other error."""
    from kvlens.shortage import shortage

    lack = shortage(error, "read")
    return None if lack is None else str(lack)
