"""`kvlens app`: the dashboard's server, started in a folder that has no settings of its own."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from streamlit import config

from kvlens.app.commands.app import ServerRefused, check_port, listening_address, server_settings
from kvlens.app.ui.common.settings import FILE, settings
from kvlens.storeys import EXTRAS, MissingExtra, missing_extra

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "a token of these tests"


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])


@dataclass(frozen=True)
class Started:
    process: subprocess.Popen[bytes]
    port: int

    def get(self, path: str, host: str | None = None, token: str | None = TOKEN) -> int:
        """Return the status of a request with this Host and token."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        headers = {} if host is None else {"Host": host}
        try:
            connection.request("GET", path, headers=headers | ({"Authorization": f"token {token}"} if token else {}))
            return connection.getresponse().status
        finally:
            connection.close()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """A server in an empty folder, of a user whose environment asks for all interfaces."""
    folder = tmp_path_factory.mktemp("elsewhere")
    asked = {"HOME": str(folder), "STREAMLIT_SERVER_ADDRESS": "0.0.0.0", "KVLENS_TOKEN": TOKEN}
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **asked}
    server = next(filter(None, (begin_server(folder, environment) for _ in range(5))), None)
    assert server is not None, "five ports were taken before the server began to listen"
    try:
        yield server
    finally:
        server.process.terminate()
        server.process.wait(120)


def begin_server(folder: Path, environment: dict[str, str]) -> Started | None:
    """Start a server and wait until it answers. None: it ended, since another process took the port before it did.
    Raises AssertionError with what it printed if it ended for another reason."""
    port, log = free_port(), folder / "server.log"
    argv = [sys.executable, "-m", "kvlens", "app", "--port", str(port), "--runs", "mine"]
    with log.open("wb") as output:
        server = Started(subprocess.Popen(argv, cwd=folder, env=environment, stdout=output, stderr=output), port)
    while server.process.poll() is None:
        try:
            server.get("/_stcore/health")
            return server
        except OSError:
            time.sleep(0.1)
    printed = log.read_text(encoding="utf-8")
    assert any(said in printed for said in ("kvlens: port_refused: ", f"Port {port} is not available")), printed
    return None


def test_a_server_that_ends_is_started_again_only_where_its_port_was_taken(tmp_path: Path) -> None:
    """The folder's own module kvlens is started in place of the package."""
    own = tmp_path / "kvlens.py"
    own.write_text("raise SystemExit('broken')")
    with pytest.raises(AssertionError, match="broken"):
        begin_server(tmp_path, {**os.environ})
    for printed in ("'kvlens: port_refused: port'", "f'Port {sys.argv[3]} is not available'"):
        own.write_text(f"import sys\nraise SystemExit({printed})")
        assert begin_server(tmp_path, {**os.environ}) is None


def test_it_listens_on_the_loopback_only(started: Started) -> None:
    """Every socket in the listening state (0A) with this port has the loopback's address, 127.0.0.1 as the kernel
    prints it."""
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        if (file := Path("/proc/net") / table).exists()
        for line in file.read_text(encoding="ascii").splitlines()[1:]
    ]
    listening = [
        local.split(":")[0] for _, local, _, state, *_ in rows if state == "0A" and _port(local) == started.port
    ]
    assert listening == ["0100007F"]


def _port(local: str) -> int:
    return int(local.split(":")[1], 16)


def test_a_foreign_host_is_refused_and_this_machine_is_not(started: Started) -> None:
    own = f"127.0.0.1:{started.port}"
    for path in ("/", "/_stcore/health", "/static/favicon.png"):
        assert started.get(path, "evil.example") == 403
        assert started.get(path, f"0.0.0.0:{started.port}") == 403
    assert (started.get("/", own), started.get("/replay", f"localhost:{started.port}")) == (200, 200)


def test_a_port_in_use_ends_with_one_sentence(started: Started) -> None:
    argv = [sys.executable, "-m", "kvlens", "app", "--port", str(started.port)]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("kvlens: port_refused: ")
    assert len(ended.stderr.splitlines()) == 1


def test_without_its_token_nothing_but_health_is_answered(started: Started) -> None:
    for path in ("/", "/replay", "/_stcore/host-config", "/_stcore/upload_file/a/b", "/media/a", "/favicon.png"):
        assert started.get(path, token=None) == 403
        assert started.get(path, token=TOKEN[::-1]) == 403
    assert started.get("/_stcore/health", token=None) == 200
    assert started.get(f"/replay?token={TOKEN.replace(' ', '+')}", token=None) == 303


@pytest.mark.parametrize("host", ["example.org", "", "localhost.example.org", "1.2.3"])
def test_hosts_that_are_no_addresses_are_refused(host: str) -> None:
    with pytest.raises(ServerRefused) as refused:
        listening_address(host)
    assert refused.value.code == "host_refused"


@pytest.mark.parametrize(("host", "address"), [("localhost", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("::1", "::1")])
def test_loopback_addresses_are_taken(host: str, address: str) -> None:
    assert listening_address(host) == address
    assert address in server_settings(address, 1)["server.allowedHosts"]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4"])
def test_other_machines_are_let_in_with_the_token_alone(host: str) -> None:
    assert server_settings(listening_address(host), 1)["server.allowedHosts"] == []


def test_other_machines_are_not_let_in_without_a_token() -> None:
    argv = [sys.executable, "-m", "kvlens", "app", "--port", str(free_port()), "--host", "0.0.0.0", "--no-token"]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("kvlens: token_required: ")


def test_a_port_that_is_free_passes_and_one_that_is_taken_does_not() -> None:
    check_port("127.0.0.1", free_port())
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(ServerRefused) as refused:
            check_port("127.0.0.1", holder.getsockname()[1])
    assert refused.value.code == "port_refused"


def test_the_settings_are_one_file_and_known_to_streamlit() -> None:
    assert (ROOT / ".streamlit" / "config.toml").resolve() == FILE.resolve()
    assert set(settings()) <= set(config._config_options_template)
    chosen = server_settings("127.0.0.1", 8600)
    assert (chosen["server.address"], chosen["server.port"]) == ("127.0.0.1", 8600)
    assert chosen["server.allowedHosts"] == ["localhost", "127.0.0.1"]
    assert chosen["browser.gatherUsageStats"] is False
    assert chosen["server.maxUploadSize"] == 5


@pytest.mark.parametrize("package", list(EXTRAS))
def test_a_missing_package_names_its_extra(package: str) -> None:
    extra = missing_extra(ModuleNotFoundError("gone", name=f"{package}.part"))
    assert isinstance(extra, MissingExtra)
    assert (extra.code, extra.package, extra.extra) == ("missing_extra", package, EXTRAS[package])
    assert f"pip install 'kvlens[{EXTRAS[package]}]'" in str(extra)


def test_a_missing_package_that_no_extra_has_stays_an_error() -> None:
    assert missing_extra(ModuleNotFoundError("gone", name="kvlens.lost")) is None
    assert missing_extra(ModuleNotFoundError("gone")) is None
