"""A process that has imported what a run needs, has the default model in memory and forks a process for every job:
`python -m kvlens.cli.warm DESCRIPTOR`.

The descriptor is a socket (AF_UNIX, SOCK_SEQPACKET). An order is one message: JSON with argv, environment and
directory, and the descriptor that the job writes to. Two messages answer it: the job's process id, once it leads a
group of its own, and its exit status as subprocess has it. One job at a time. The process ends when its socket is
closed at the other end, or when nothing was asked for `idle_seconds()`."""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import random
import select
import socket
import sys
import threading
import traceback
from typing import Any, NoReturn

from kvlens.runs.request import READ_AHEAD

IDLE, IDLE_S = "KVLENS_WARM_IDLE", 600.0
"""environment variable: seconds without an order after which the process ends, and what they are unless set"""
MOST_SHARE = 0.25
"""of free memory, that the model's files may take"""
LIMIT = 1 << 20
"""bytes of an order at most"""
NEEDED = (
    "kvlens.cli.main",
    "kvlens.engine.engine",
    "kvlens.lens.whatif",
    "kvlens.runs.storing",
    "kvlens.runs.reference",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.auto.tokenization_auto",
)
"""modules that runs, repeats and what-ifs import; more are imported by the job itself"""


def main() -> None:
    """Imports, then serves."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    for name in NEEDED:
        importlib.import_module(name)
    channel.settimeout(idle_seconds())
    serve(channel)


def idle_seconds() -> float:
    """Return the seconds without an order after which the process ends; IDLE_S where the variable holds no number above
    0."""
    try:
        seconds = float(os.environ.get(IDLE, IDLE_S))
    except ValueError:
        return IDLE_S
    return seconds if 0 < seconds < float("inf") else IDLE_S


def keep_model() -> None:
    """Has the default model in memory, where that is a small part of what is free: processes forked from here share it.
    Torch runs on one thread meanwhile, so that no threads are there that a forked process would miss."""
    import torch

    from kvlens.engine.models import load
    from kvlens.models import find
    from kvlens.models.device import host_bytes
    from kvlens.models.find import default_model

    name = default_model()
    files = find.files_of(name)  # nothing is converted here: a first run shows how far that is
    most = MOST_SHARE * (host_bytes() or 0)
    if not files or find.find_model(name) is not None or sum(size for _, size, _ in files) > most:
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        loaded = load(name)
        loaded.fingerprint()
    except Exception:  # a model that is not whole, too little memory: a run meets it too and says so
        return
    finally:
        torch.set_num_threads(threads)
    find.keep_model(name, loaded)


def serve(channel: socket.socket) -> None:
    """Carries out orders until there is nobody to give one. An order that waits already is not kept waiting."""
    while True:
        if not select.select([channel], [], [], 0)[0]:
            keep_model()
        gc.collect()
        gc.freeze()
        try:
            message, descriptors, _, _ = socket.recv_fds(channel, LIMIT, 1)
            if not message:
                return
            order = json.loads(message)
            if READ_AHEAD in order["argv"]:  # nobody waits for it, and a run will follow
                keep_model()
            child = os.fork()
            if child == 0:
                _become(order, channel, descriptors[0])
            os.close(descriptors[0])
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            channel.send(str(status).encode())
        except OSError:  # nothing was asked for long, or nobody is there to hear
            return


def _become(order: Any, channel: socket.socket, output: int) -> NoReturn:
    """Makes the forked process the job: its own group, output, environment, folder and random numbers."""
    from kvlens.cli import main as command_line

    os.setsid()
    channel.send(str(os.getpid()).encode())
    channel.close()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    sys.stdout = open(1, "w", encoding="utf-8", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["directory"])
    random.seed()
    sys.argv = list(order["argv"])
    status: object = 0
    try:
        command_line.main()
    except SystemExit as stop:
        status = stop.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    _leave(status if isinstance(status, int) else 1)


def _leave(status: int) -> NoReturn:
    """Ends as multiprocessing ends its forks: threads and exit functions are waited for, but the modules of the process
    above are not taken apart, which takes longer than a short run."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
