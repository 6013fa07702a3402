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
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in, with the token.")
    ] = "127.0.0.1",
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Let every user of this machine in; for the loopback only.")
    ] = False,
    runs: RunsDir = None,
) -> None:
    """Start the dashboard for this machine's browser, and print its address with the token. Ctrl-C stops it."""
    address = listening_address(host)
    check_port(address, port)
    os.environ["KVLENS_RUNS"] = str(runs_folder(runs).resolve())
    from kvlens.app.ui.common import access, reach

    if no_token:
        os.environ[access.VARIABLE] = access.OFF
    access.check_token(not reach.is_loopback(address))
    from kvlens.app.entry import app as server

    # Streamlit puts the folder of argv[0] on the import path. Under `python -m kvlens` that folder is the package.
    sys.argv = [str(Path(sys.executable).with_name("kvlens"))]
    server.run(config=server_settings(address, port))


def server_settings(address: str, port: int) -> dict[str, Any]:
    """Return Streamlit's options for a server at `address` and `port`: those of the settings file, which win over files
    and variables of the user's own. Beyond the loopback the server goes by every name."""
    from kvlens.app.ui.common.reach import is_loopback
    from kvlens.app.ui.common.settings import settings

    hosts = list(dict.fromkeys([*settings()["server.allowedHosts"], address])) if is_loopback(address) else []
    return {**settings(), "server.address": address, "server.port": port, "server.allowedHosts": hosts}


def listening_address(host: str) -> str:
    """Return the IP address to listen on. Raises ServerRefused (host_refused) if `host` is no IP address."""
    try:
        return str(ipaddress.ip_address("127.0.0.1" if host == "localhost" else host))
    except ValueError:
        raise ServerRefused(
            "host_refused",
            f"--host takes an IP address of this machine, not '{host}': 127.0.0.1 for this machine alone, 0.0.0.0 for "
            "others too.",
        ) from None


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
