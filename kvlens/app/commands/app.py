"""`kvlens app`: the dashboard's server."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlens.cli.options import RunsDir, runs_folder

PORT = 8501


class ServerRefused(ValueError):
    """The server cannot start as requested. `code`: host_refused or port_refused."""

    def __init__(self, code: str, sentence: str) -> None:
        self.code = code
        super().__init__(f"{code}: {sentence}")


def app(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = PORT,
    host: Annotated[str, typer.Option(help="Address of this machine's loopback to listen on.")] = "127.0.0.1",
    runs: RunsDir = None,
) -> None:
    """Start the dashboard for this machine's browser, and print its address. Ctrl-C stops it."""
    address = loopback_address(host)
    check_port(address, port)
    os.environ["KVLENS_RUNS"] = str(runs_folder(runs).resolve())
    from kvlens.app.entry import app as server

    # Streamlit puts the folder of argv[0] on the import path. Under `python -m kvlens` that folder is the package.
    sys.argv = [str(Path(sys.executable).with_name("kvlens"))]
    server.run(config=server_settings(address, port))


def server_settings(address: str, port: int) -> dict[str, Any]:
    """Return Streamlit's options for a server at `address` and `port`: those of the settings file, which win over files
    and variables of the user's own."""
    from kvlens.app.ui.common.settings import settings

    hosts = list(dict.fromkeys([*settings()["server.allowedHosts"], address]))
    return {**settings(), "server.address": address, "server.port": port, "server.allowedHosts": hosts}


def loopback_address(host: str) -> str:
    """Return the address to listen on. Raises ServerRefused (host_refused) unless `host` is a loopback address: the
    dashboard has no accounts."""
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:
        address = None
    if address is None or not address.is_loopback:
        raise ServerRefused(
            "host_refused",
            f"kvlens app listens on this machine only, not on '{host}': the dashboard has no accounts. From another "
            f"machine, forward the port by ssh -L {PORT}:127.0.0.1:{PORT}, or put a proxy with a login before it.",
        )
    return str(address)


def check_port(address: str, port: int) -> None:
    """Raise ServerRefused (port_refused) if the server cannot listen on `port`."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address, port))
        except OSError as problem:
            why = "is in use" if problem.errno == errno.EADDRINUSE else "cannot be used"
            raise ServerRefused("port_refused", f"port {port} {why}; choose another with --port.") from None
