"""Build the wheel, install it in an empty environment, and use it outside the repository: `make wheel-test`.

The steps, in one temporary folder that is removed at the end:

1. `python -m build`: source archive, and from that the wheel. The wheel holds the files of the package and no others.
2. An empty environment gets the wheel without extras. The commands of the core work there; `kvlens app` and
   `kvlens report` name the extra that they need.
3. The extra `app` is installed. Five commands work: doctor, methods, gallery, run, app. The dashboard answers on the
   loopback, refuses a foreign Host, and a headless Chromium opens pages by deep link and finds no error on them.

The versions are those of requirements.txt. torch comes first, by its exact version: the CPU build where pip has one.
"""

from __future__ import annotations

import argparse
import http.client
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "Alice was beginning to get very tired of sitting by her sister on the bank."
UID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
PATIENCE_S = 600
"""of one command: the slowest one downloads"""


def main() -> None:
    """Carry out the steps; the first that fails ends the process with its error."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--pictures", type=Path, help="folder for a picture of each page; none is kept by default")
    pictures = parser.parse_args().pictures
    with tempfile.TemporaryDirectory(prefix="kvlens-wheel-") as folder:
        trial = Trial(Path(folder))
        trial.build()
        trial.create_environment()
        trial.try_core()
        trial.install("app")
        uids = trial.try_commands()
        with trial.dashboard() as port:
            trial.try_server(port)
            trial.try_pages(port, uids, pictures)
    print("The wheel installs and works outside the repository.")


class Trial:
    """An empty environment, a folder elsewhere, and the wheel, in a folder that the caller removes."""

    def __init__(self, folder: Path) -> None:
        self.binaries, self.elsewhere, self.dist = folder / "env" / "bin", folder / "elsewhere", folder / "dist"
        self.elsewhere.mkdir()
        (self.elsewhere / "prompt.txt").write_text(PROMPT, encoding="utf-8")
        removed = ("PYTHONPATH", "KVLENS_RUNS", "KVLENS_MODEL", "VIRTUAL_ENV")
        self.environment = {name: value for name, value in os.environ.items() if name not in removed}
        self.environment |= {"KVLENS_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "KVLENS_WARM": "off"}

    def build(self) -> None:
        """Build the source archive and the wheel; check the wheel's files against the repository's."""
        with timed("build"):
            execute([sys.executable, "-m", "build", "--outdir", str(self.dist), str(ROOT)], self.elsewhere, os.environ)
        with zipfile.ZipFile(self.wheel) as archive:
            names = {name for name in archive.namelist() if ".dist-info/" not in name}
        expected = package_files()
        assert names == expected, f"missing: {sorted(expected - names)}; not expected: {sorted(names - expected)}"
        print(f"{self.wheel.name}: {self.wheel.stat().st_size / 1e6:.1f} MB, {len(names)} files")

    @property
    def wheel(self) -> Path:
        """The built wheel."""
        (path,) = self.dist.glob("*.whl")
        return path

    def create_environment(self) -> None:
        """Create the environment and install torch and the core in it."""
        with timed("environment with torch"):
            execute([sys.executable, "-m", "venv", str(self.binaries.parent)], self.elsewhere, self.environment)
            (pin,) = (line for line in requirements() if line.startswith("torch=="))
            self._pip("install", pin)
        self.install("")

    def install(self, extra: str) -> None:
        """Install the wheel with an extra, at the tested versions."""
        constraints = self.dist / "constraints.txt"
        constraints.write_text("\n".join(requirements()), encoding="utf-8")
        with timed(f"install {extra or 'core'}"):
            self._pip("install", "-c", str(constraints), f"kvlens[{extra}] @ {self.wheel.as_uri()}")

    def try_core(self) -> None:
        """Run the core's commands where Streamlit and Plotly are not installed, and two commands that need them."""
        for name in ("streamlit", "plotly", "kernels", "store", "kvlens.pip"):
            code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is not None)"
            execute([str(self.binaries / "python"), "-c", code], self.elsewhere, self.environment)
        self._kvlens("run", "prompt.txt", "--max-new", "4")
        self._kvlens("bench", "tasks")
        for arguments in (["app"], ["report", "any", "--out", "any.html"]):
            error = self._kvlens(*arguments, status=1).stderr
            assert "missing_extra" in error and "pip install 'kvlens[app]'" in error, error  # noqa: PT018
            assert len(error.splitlines()) == 1, error

    def try_commands(self) -> list[str]:
        """Run doctor, methods, gallery, run and report; return the uids of the gallery's run and the new one."""
        assert "FAIL" not in self._kvlens("doctor").stdout
        assert "snapkv" in self._kvlens("methods").stdout
        lost = self._kvlens("gallery", "snapkv").stdout.split()[-1]
        new = self._kvlens("run", "prompt.txt", "--max-new", "8").stdout.split()[-1]
        assert UID.fullmatch(new), new
        self._kvlens("report", lost, "--out", "report.html")
        assert (self.elsewhere / "report.html").read_text(encoding="utf-8").lower().startswith("<!doctype html>")
        return [lost, new]

    @contextmanager
    def dashboard(self) -> Iterator[int]:
        """`kvlens app` on a free port while the block runs."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        argv = [str(self.binaries / "kvlens"), "app", "--no-token", "--port", str(port)]
        process = subprocess.Popen(argv, cwd=self.elsewhere, env=self.environment, stdout=subprocess.DEVNULL)
        try:
            for _ in range(600):
                try:
                    http_status(port, "/_stcore/health", f"127.0.0.1:{port}")
                    break
                except OSError:
                    assert process.poll() is None, "kvlens app ended"
                    time.sleep(0.1)
            yield port
        finally:
            process.terminate()
            process.wait(30)

    def try_server(self, port: int) -> None:
        """Check that the dashboard answers this machine's names and refuses others."""
        assert http_status(port, "/", f"127.0.0.1:{port}") == 200
        assert http_status(port, "/", "evil.example") == 403
        assert http_status(port, "/static/favicon.png", "evil.example") == 403

    def try_pages(self, port: int, uids: Sequence[str], pictures: Path | None) -> None:
        """Open pages in a headless Chromium, the first by a deep link, and check that each draws what it is for."""
        lost, _ = uids
        landmarks = {
            f"replay?run={lost}": f"#player[data-run='{lost}'] canvas",
            "": "[data-testid='stDataFrame']",
            f"heads?run={lost}": ".js-plotly-plot",
            "method": "[data-testid='stSelectbox']",
            "benchmarks": ".js-plotly-plot",
            "run": "button[data-testid='stBaseButton-primary']",
        }
        with timed("pages"), sync_playwright() as playwright:
            flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=flags)
            page = browser.new_page(viewport={"width": 1400, "height": 1000})
            faults: list[str] = []
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.on("request", lambda request: faults.extend(foreign(request.url, port)))
            for path, landmark in landmarks.items():
                page.goto(f"http://127.0.0.1:{port}/{path}")
                expect(page.locator(landmark).first).to_be_attached(timeout=60_000)
                settle(page)
                assert page.locator("[data-testid='stException'], [data-testid='stAlertContentError']").count() == 0, (
                    path
                )
                if pictures is not None:
                    pictures.mkdir(parents=True, exist_ok=True)
                    page.screenshot(path=str(pictures / f"{path.partition('?')[0] or 'home'}.png"))
            browser.close()
            assert faults == []

    def _pip(self, *arguments: str) -> None:
        execute([str(self.binaries / "python"), "-m", "pip", "-q", *arguments], self.elsewhere, self.environment)

    def _kvlens(self, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        with timed(f"kvlens {' '.join(arguments)}"):
            return execute([str(self.binaries / "kvlens"), *arguments], self.elsewhere, self.environment, status)


def package_files() -> set[str]:
    """Return the files of the package as a wheel names them, links followed: those that git knows, and new ones."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = execute([*listing, "kvlens", "kernels", "store", "pages", "app.py"], ROOT, os.environ).stdout.split()
    files = {name for name in listed if (ROOT / name).is_file() and not (ROOT / name).is_symlink()}
    places = {"kernels/": "kvlens/kernels/", "store/": "kvlens/store/", "pages/": "kvlens/app/pages/"}
    for top, place in places.items():
        files = {place + name.removeprefix(top) if name.startswith(top) else name for name in files}
    settings = {"kvlens/app/.streamlit/config.toml", "kvlens/app/pages/.streamlit/config.toml"}
    return files - {"app.py"} | {"kvlens/app/entry.py"} | settings


def requirements() -> list[str]:
    """Return the tested requirements, without comments."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def http_status(port: int, path: str, host: str) -> int:
    """Return the status of a GET with this Host."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path, headers={"Host": host})
        return connection.getresponse().status
    finally:
        connection.close()


def foreign(url: str, port: int) -> list[str]:
    """Return the address in a list if it is not the dashboard's own."""
    own = (f"http://127.0.0.1:{port}/", f"ws://127.0.0.1:{port}/", "data:", "blob:")
    return [] if url.startswith(own) else [f"request to {url}"]


def settle(page: Page) -> None:
    """Return once the page's script is at rest."""
    expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning", timeout=60_000)


def execute(
    argv: Sequence[str], folder: Path, environment: os._Environ[str] | dict[str, str], status: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a program in a folder. AssertionError with its output unless it ends with `status`."""
    ended = subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert ended.returncode == status, f"{' '.join(argv)}: status {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return ended


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print how long the block took."""
    started = time.monotonic()
    yield
    print(f"{time.monotonic() - started:6.1f} s  {what}", flush=True)


if __name__ == "__main__":
    main()
