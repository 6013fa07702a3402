"""A method in a Python file of one's own: what of a file is a method, and what is refused by which code."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from shutil import copy

import pytest
from support import raises_code
from typer.testing import CliRunner
from uiruns import ROOT

from kvlens import methods
from kvlens.app.ui.common import access, reach
from kvlens.app.ui.common.job import Job
from kvlens.app.ui.ownmethod import view
from kvlens.checking import check
from kvlens.checking.methodfile import MOST_BYTES, MethodFileRefused, read_method
from kvlens.cli.main import app
from kvlens.methods.filenames import is_method_file

SOURCE = ROOT / "tests" / "plugin" / "small_norms.py"


WHOLE = """
from kvlens.methods.base import Method
from kvlens.methods.families.prompt_eviction import PromptEvictionParameters


class Bare(Method):
    name = "bare"
    title = "Bare"
    paper = "ours"
    summary = "keeps nothing"
    Parameters = PromptEvictionParameters
"""
"""a method that lacks its arithmetic"""


@pytest.fixture
def forgotten() -> None:
    """Methods that a test registers are gone after it."""
    before = dict(methods._registered)
    yield
    methods._registered.clear()
    methods._registered.update(before)
    methods.registry.cache_clear()


@pytest.fixture
def file(tmp_path: Path, forgotten: None) -> Path:
    return Path(copy(SOURCE, tmp_path / "mine.py"))


def test_a_file_is_told_from_a_name() -> None:
    assert [is_method_file(name) for name in ("a.py", "dir/a.py:name", "snapkv", "kvpress:Knorm")] == [
        True,
        True,
        False,
        False,
    ]


def test_the_method_of_a_file_is_registered(file: Path) -> None:
    method = read_method(str(file))
    assert (method.name, methods.get("small_norms")) == ("small_norms", method)
    assert read_method(f"{file}:small_norms").title == method.title


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("file_missing", None),
        ("file_too_large", "#" * (MOST_BYTES + 1)),
        ("file_fails", "raise SystemExit(3)"),
        ("file_fails", "import nothing_of_this_name"),
        ("no_method", "from kvlens.methods.base import Method"),
        ("name_taken", SOURCE.read_text(encoding="utf-8").replace('"small_norms"', '"snapkv"')),
        ("bad_method", WHOLE.replace("    Parameters = PromptEvictionParameters\n", "")),
        ("bad_method", WHOLE.replace("= PromptEvictionParameters", "= object")),
        ("bad_method", WHOLE),
        ("bad_method", WHOLE.replace('title = "Bare"', "title = 7")),
        (
            "several_methods",
            SOURCE.read_text(encoding="utf-8") + "\n\nclass Second(SmallNorms):\n    name = 'second'\n",
        ),
    ],
)
def test_another_file_is_refused_by_its_code(tmp_path: Path, forgotten: None, code: str, text: str | None) -> None:
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(MethodFileRefused) as refused:
        read_method(str(file))
    assert (refused.value.code, refused.value.path) == (code, file)


def test_a_class_without_parameters_ends_the_check_with_status_1(file: Path) -> None:
    file.write_text(WHOLE.replace("    Parameters = PromptEvictionParameters\n", ""), encoding="utf-8")
    result = CliRunner().invoke(app, ["check-method", str(file)])
    assert isinstance(result.exception, MethodFileRefused)
    assert result.exception.code == "bad_method"


def test_a_file_is_no_name_of_a_method(file: Path) -> None:
    for name in (str(file), f"{file}:small_norms"):
        with raises_code("method_is_file", methods.UnknownMethod, file=name):
            methods.get(name)


def test_the_command_checks_a_file_and_the_page_reads_its_report(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "cases", lambda method: iter(()))  # every case takes minutes; test_check_method has them
    result = CliRunner().invoke(app, view.command(str(file), sha256(file.read_bytes()).hexdigest())[3:])
    assert result.exit_code == 1  # no case ran, so nothing was shown to hold
    job = Job("1", [], "", 0.0)
    job.log.extend(["noise", *result.stdout.splitlines()])
    report = view.result_of(job)
    assert report is not None
    assert (report["method"], report["passed"]) == ("small_norms", False)
    frame = view.frame_of(report)
    assert len(frame) == len(check.TRUTHS)
    assert frame["cases"].sum() == 1
    assert view.result_of(Job("2", [], "", 0.0)) is None


def test_a_file_that_has_changed_since_it_was_shown_does_not_run(file: Path, tmp_path: Path) -> None:
    command = view.command(str(file), sha256(file.read_bytes()).hexdigest())
    trace = tmp_path / "ran"
    file.write_text(f"open({str(trace)!r}, 'w').close()\n", encoding="utf-8")
    assert CliRunner().invoke(app, command[3:]).exit_code != 0
    with pytest.raises(MethodFileRefused) as refused:
        read_method(str(file), command[-1])
    assert refused.value.code == "file_changed"
    assert not trace.exists()


def test_the_smallest_failing_case_is_named(file: Path) -> None:
    mismatch = {"step": 3, "layer": 1, "head": None, "expected": "1", "actual": "0.9"}
    failure = {"model": "random", "prompt_tokens": 37, "budget": "50%", "mismatch": mismatch}
    row = {"truth": "masses", "says": "masses add up", "status": "FAIL", "cases": 4, "failure": failure}
    (case,) = view.frame_of(json.loads(json.dumps({"truths": [row]})))["smallest case that fails"]
    for part in ("random", "37", "step 3", "layer 1", "0.9"):
        assert part in case


@pytest.mark.parametrize(
    ("others", "token", "code"), [(True, "t", "open_server"), (False, None, "no_token"), (False, "t", None)]
)
def test_a_server_that_others_reach_runs_no_file(
    monkeypatch: pytest.MonkeyPatch, others: bool, token: str | None, code: str | None
) -> None:
    monkeypatch.setattr(reach, "answers_others", lambda: others)
    monkeypatch.setattr(access, "token", lambda: token)
    assert view.refusal() == code
    assert code is None or code in view.REFUSED
