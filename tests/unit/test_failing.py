"""How commands and pages end on an error that nothing foresaw."""

from __future__ import annotations

import errno
import resource
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
from pydantic import ValidationError
from test_bad_input import kvlens as end_status

from kvlens.cli import options
from kvlens.cli.failing import option_of, run_command, take_debug_flag
from kvlens.files import naming, write_file, write_plain
from kvlens.runs.request import RunRequest
from kvlens.text.failures import CODE, DEBUG, FILE_CODE, unexpected


def ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, *words: str
) -> str:
    """Run a command that raises `error`; what it wrote to stderr."""
    monkeypatch.setattr(sys, "argv", ["kvlens", *words])
    monkeypatch.setenv(DEBUG, "0")  # so that what the flag sets in this process ends with the test

    def command() -> None:
        raise error

    monkeypatch.setattr(options.err, "_file", None)
    with pytest.raises(SystemExit) as stop:
        run_command(command)
    assert stop.value.code == 1
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [KeyError("span"), TypeError("a\nb"), IndexError(), RecursionError("deep"), AssertionError()]
)
def test_an_unforeseen_error_is_one_sentence_with_its_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    text = ended(monkeypatch, capsys, error)
    assert text.startswith(f"kvlens: {CODE}: {type(error).__name__}")
    assert text.count("\n") == 1


@pytest.mark.parametrize("words", [("--debug", "runs"), ("runs", "--debug")])
def test_the_trace_is_printed_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    text = ended(monkeypatch, capsys, KeyError("span"), *words)
    assert text.startswith("Traceback ")
    assert text.splitlines()[-1].startswith(f"kvlens: {CODE}: KeyError")
    assert sys.argv == ["kvlens", "runs"]


@pytest.mark.parametrize(
    ("fields", "option"),
    [
        ({"max_new": 0}, "--max-new"),
        ({"seed": "x"}, "--seed"),
        ({"oracle": "every=0"}, "--oracle"),
        ({"hold": [3]}, "hold"),
    ],
)
def test_a_field_is_refused_in_words_of_kvlens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fields: dict[str, object], option: str
) -> None:
    with pytest.raises(ValidationError) as refusal:
        RunRequest.model_validate(fields)
    text = ended(monkeypatch, capsys, refusal.value)
    assert text.startswith(f"kvlens: {option}")
    assert text.endswith(".\n")
    assert "Input should" not in text
    assert "Value error" not in text


def test_a_field_is_written_as_its_option() -> None:
    assert (option_of("max_new"), option_of("overrides.x"), option_of("")) == ("--max-new", "overrides.x", "")


def test_words_behind_the_dashes_are_left_alone() -> None:
    assert take_debug_flag(["run", "--", "--debug"]) == ["run", "--", "--debug"]


def test_a_refused_file_names_itself_and_not_a_number(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ended(monkeypatch, capsys, PermissionError(errno.EACCES, "Permission denied", "a.json"))
    assert text.startswith(f"kvlens: {FILE_CODE}: 'a.json' ")
    assert "Errno" not in text


def test_a_full_disk_is_refused_with_the_file_that_did_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system names no file where a write fails, as it does where opening fails."""
    file = tmp_path / "runs" / "run.json"
    file.parent.mkdir()
    size, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, most))
    try:
        for write in (write_file, partial(write_plain, durable=True)):
            with pytest.raises(OSError, match=r"run\.json") as refused:
                write(file, b"x" * 64)
            assert (refused.value.errno, refused.value.filename) == (errno.EFBIG, str(file))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
        signal.signal(signal.SIGXFSZ, before)
    assert str(file) in ended(monkeypatch, capsys, refused.value)
    assert ended(monkeypatch, capsys, OSError(errno.ENOSPC, "full")).startswith(f"kvlens: {FILE_CODE}: ")
    with pytest.raises(FileNotFoundError) as opened, naming(tmp_path):
        file.with_name("absent").read_bytes()
    assert opened.value.filename == str(file.with_name("absent"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no device that is always full")
def test_a_prompt_that_does_not_fit_names_its_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert end_status(monkeypatch, "prompt", "--model", "demo", "--length", "300", "--out", "/dev/full") == 1
    assert capsys.readouterr().err.startswith(f"kvlens: {FILE_CODE}: '/dev/full' ")


def test_an_error_names_where_it_was_raised() -> None:
    def raises() -> None:
        raise KeyError("x" * 900)

    with pytest.raises(KeyError) as caught:
        raises()
    sentence = unexpected(caught.value, "look")
    assert "in test_failing.py, line" in sentence
    assert len(sentence) < 400
