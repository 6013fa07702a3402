"""A plugin that ends the process or hangs, at import or in a hook: one sentence with a code, a non-zero status, and no
harm to other methods or lanes. A plugin that prints does not break JSON on stdout."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from warmprocess import WarmProcess

from kvlens.hangs import IMPORT_VARIABLE, VARIABLE
from kvlens.methods.faults import HANGS, RAISED
from kvlens.plugins import CODE
from kvlens.store.reader import TraceReader

METHOD = """
from kvlens.methods.families.prompt_eviction import PromptEviction, PromptEvictionParameters
from kvlens.methods.hooks import Needs

class Ends(PromptEviction):
    name, title, paper, summary = "{name}", "{name}", "none", "ends the process in a hook"
    family = "prompt_eviction"
    Parameters = PromptEvictionParameters
    needs = Needs()

    def score(self, prompt, layer, before):
        return prompt.keys[layer, :, :before, 0]

    def {hook}(self, *arguments, **named):
        {body}
"""
LOUD = "print('{\"phase\": hello')\n"
IMPORTS = {
    "ends_at_import": "print('bye')\nraise SystemExit(0)\n",
    "interrupts_at_import": "raise KeyboardInterrupt\n",
    "base_at_import": "class Own(BaseException):\n    pass\nraise Own('mine')\n",
    "hangs_at_import": "import sys, time\ntime.sleep(1000 if 'hangs_at_import' in sys.argv else 0)\nraise SystemExit\n",
}
HOOKS = {
    "ends_at_prefill": ("score", "SystemExit(0)"),
    "ends_at_step": ("select", "SystemExit(0)"),
    "interrupts_at_step": ("decode_end", "KeyboardInterrupt"),
}
HANGING = {
    "sleeps_at_step": ("select", "__import__('time').sleep(1000)"),
    "loops_at_prefill": ("score", "[None for _ in iter(int, 1)]"),
    "sleeps_in_init": ("__init__", "__import__('time').sleep(1000)"),
}
PRINTS = "prints_at_step"
PRINTED = '{"phase": "select"'
PRINTING = f"print({PRINTED!r})\n        return super().select(*arguments, **named)"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugins, as pip leaves them."""
    folder = tmp_path_factory.mktemp("site")
    points = []
    for name, text in IMPORTS.items():
        (folder / f"{name}.py").write_text(text)
        points.append(f"{name} = {name}:Ends")
    bodies = {name: (hook, f"raise {error}") for name, (hook, error) in HOOKS.items()}
    for name, (hook, body) in (bodies | HANGING | {PRINTS: ("select", PRINTING)}).items():
        (folder / f"{name}.py").write_text(LOUD + METHOD.format(name=name, hook=hook, body=body))
        points.append(f"{name} = {name}:Ends")
    info = folder / "faults-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faults\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvlens.methods]\n" + "\n".join(points) + "\n")
    return folder


START = f"""
import os
os.environ |= {{"{VARIABLE}": "1", "{IMPORT_VARIABLE}": "4"}}
from kvlens import methods
methods.forget()
"""


class Commands:
    """Commands in processes that start with the plugins installed, and look for them themselves."""

    def __init__(self, process: WarmProcess, folder: Path) -> None:
        self._process, self.folder = process, folder

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._process.kvlens(self.folder, START, *arguments)

    def run(self, method: str, *more: str) -> subprocess.CompletedProcess[str]:
        """A short run of a short prompt."""
        prompt = self.folder / "p.txt"
        prompt.write_text("The river was wide and the bridge was old. " * 12)
        options = ["--method", method, "--budget", "50%", "--max-new", "6", "--ignore-eos", "--set", "window=8"]
        return self("run", str(prompt), *options, "--runs", str(self.folder / "runs"), *more)


@pytest.fixture(scope="module")
def kvlens(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with WarmProcess(site) as process:
        yield Commands(process, tmp_path_factory.mktemp("printed"))


@pytest.mark.parametrize("name", IMPORTS)
def test_a_plugin_that_ends_at_import_is_refused_in_one_sentence(kvlens: Commands, name: str) -> None:
    ended = kvlens.run(name)
    assert ended.returncode == 1
    sentences = [line for line in ended.stderr.splitlines() if line.startswith("kvlens: ")]
    assert len(sentences) == 1
    assert sentences[0].startswith(f"kvlens: {CODE}: plugin method '{name}' ")


def test_other_methods_are_unharmed_and_json_stays_json(kvlens: Commands) -> None:
    listed = kvlens("methods", "--json")
    assert listed.returncode == 0
    names = {entry["name"] for entry in json.loads(listed.stdout)}
    assert {"snapkv", *HOOKS} <= names
    assert not names & set(IMPORTS)
    assert "bye" in listed.stderr
    ran = kvlens.run("snapkv", "--progress-json")
    assert ran.returncode == 0
    assert json.loads(ran.stdout.splitlines()[-1])["phase"] == "done"
    assert {type(json.loads(line)) for line in ran.stdout.splitlines()} == {dict}
    assert "bye" not in ran.stderr  # a built-in method is run without importing a plugin


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_that_ends_the_process_is_a_fault(kvlens: Commands, name: str) -> None:
    hook, error = HOOKS[name]
    ended = kvlens.run(name, "--progress-json")
    assert ended.returncode == 1
    sentences = [line for line in ended.stderr.splitlines() if line.startswith("kvlens: ")]
    assert len(sentences) == 1
    called = "prefill_end" if hook == "score" else hook  # a family's hook is called inside the engine's
    assert sentences[0].startswith(f"kvlens: {RAISED}: {name}.{called} raised {error.partition('(')[0]}")
    assert json.loads(ended.stdout.splitlines()[-1])["phase"] == "error"


@pytest.mark.parametrize("name", HANGING)
def test_a_hook_that_hangs_is_a_fault(kvlens: Commands, name: str) -> None:
    ended = kvlens.run(name, "--progress-json")
    assert ended.returncode == 1
    sentences = [line for line in ended.stderr.splitlines() if line.startswith("kvlens: ")]
    assert len(sentences) == 1
    hook = {"score": "prefill_end"}.get(HANGING[name][0], HANGING[name][0])
    assert sentences[0].startswith(f"kvlens: {HANGS}: {name}.{hook} ")
    assert json.loads(ended.stdout.splitlines()[-1])["phase"] == "error"


def test_a_lane_that_cannot_be_interrupted_is_given_up(kvlens: Commands) -> None:
    kvlens.run("snapkv")
    options = ["--methods", "sleeps_at_step,snapkv", "--budget", "50%", "--max-new", "3"]
    ended = kvlens("race", str(kvlens.folder / "p.txt"), *options, "--runs", str(kvlens.folder / "hung"), "--json")
    assert ended.returncode == 0, ended.stderr[-2000:]
    lanes = {lane["method"]: lane for lane in json.loads(ended.stdout)["lanes"]}
    assert lanes["snapkv"]["state"] == lanes["full"]["state"] == "completed"
    assert lanes["sleeps_at_step"]["state"] == "failed"
    assert lanes["sleeps_at_step"]["message"].startswith(f"{HANGS}: sleeps_at_step.select ")


def test_text_that_a_hook_prints_does_not_break_json(kvlens: Commands) -> None:
    ran = kvlens.run(PRINTS, "--progress-json")
    assert ran.returncode == 0, ran.stderr[-2000:]
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert lines[-1]["phase"] == "done"
    assert {line["phase"] for line in lines} >= {"prefill", "decode", "store"}
    with TraceReader.open(kvlens.folder / "runs", lines[-1]["uid"]) as reader:
        assert ran.stderr.splitlines().count(PRINTED) == reader.n_steps * reader.n_layers


def test_text_that_a_hook_prints_does_not_break_the_json_of_a_race(kvlens: Commands) -> None:
    prompt = kvlens.folder / "p.txt"
    prompt.write_text("The river was wide and the bridge was old. " * 12)
    options = ["--methods", PRINTS, "--budget", "50%", "--max-new", "3", "--runs", str(kvlens.folder / "loud")]
    for form in ("--json", "--progress-json"):
        ended = kvlens("race", str(prompt), *options, form)
        assert ended.returncode == 0, ended.stderr[-2000:]
        assert {type(json.loads(line)) for line in ended.stdout.splitlines()} == {dict}
        assert PRINTED in ended.stderr.splitlines()


def test_a_run_that_reports_to_people_leaves_stdout_to_the_hooks(kvlens: Commands) -> None:
    ran = kvlens.run(PRINTS)
    assert ran.returncode == 0, ran.stderr[-2000:]
    *printed, uid = ran.stdout.splitlines()
    assert PRINTED in printed
    assert (kvlens.folder / "runs" / uid).is_dir()


def test_a_run_that_faults_while_decoding_is_stored_as_failed(kvlens: Commands) -> None:
    kvlens.run("ends_at_step")
    listed = json.loads(kvlens("runs", "list", "--runs", str(kvlens.folder / "runs"), "--json").stdout)
    stored = [row for row in listed if row["method"] == "ends_at_step"]
    assert {row["status"] for row in stored} == {"failed"}


def test_the_other_lanes_of_a_race_run_on(kvlens: Commands) -> None:
    kvlens.run("snapkv")
    names = "snapkv,ends_at_step,interrupts_at_step,ends_at_import"
    options = ["--methods", "snapkv,ends_at_step,interrupts_at_step", "--budget", "50%", "--max-new", "6"]
    ended = kvlens("race", str(kvlens.folder / "p.txt"), *options, "--runs", str(kvlens.folder / "races"), "--json")
    assert ended.returncode == 0, ended.stderr[-2000:]
    lanes = {lane["method"]: lane for lane in json.loads(ended.stdout)["lanes"]}
    assert lanes["snapkv"]["state"] == "completed"
    for name in ("ends_at_step", "interrupts_at_step"):
        assert lanes[name]["state"] == "failed"
        assert lanes[name]["message"].startswith(f"{RAISED}: {name}.")
    assert set(lanes) == set(names.split(",")) - {"ends_at_import"} | {"full"}
