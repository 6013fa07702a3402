"""Python imports this module at the start of every process whose PYTHONPATH has this folder: it logs which files of the
repository the process and its forks open, and during which test (tests/proved.py). A module read from its cache is
logged as its source."""

import os
import sys


def _log_reads(folder: str, root: str) -> None:
    """Append each path below `root`, with the file of the test that runs, once to a file of `folder`. `open` is raised
    for imports too."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    log = os.open(os.path.join(folder, str(os.getpid())), flags, 0o644)
    logged: set[tuple[str, str]] = set()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | os.PathLike):
            return
        path = os.path.abspath(os.fspath(arguments[0]))
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
        if (path, test) in logged or not isinstance(path, str) or not path.startswith(root):
            return
        logged.add((path, test))
        head, tail = os.path.split(path)
        if os.path.basename(head) == "__pycache__":
            path = os.path.join(os.path.dirname(head), tail.partition(".")[0] + ".py")
        os.write(log, f"{path}\t{test}\n".encode("utf-8", "surrogateescape"))

    sys.addaudithook(hook)


if "KVLENS_READ_LOG" in os.environ:
    _log_reads(os.environ["KVLENS_READ_LOG"], os.environ["KVLENS_READ_ROOT"])
