"""Calls that take longer than their limit are interrupted, and their threads given up if they cannot be."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from kvlens import hangs
from kvlens.hangs import Hang, Watch
from kvlens.methods.faults import HANGS, MethodFault, limited, stray

LIMIT_S = 0.3


def loop() -> None:
    while True:
        pass


def sleep() -> None:
    time.sleep(1000)


@pytest.mark.parametrize("work", [loop, sleep])
def test_a_call_of_the_main_thread_is_interrupted(work: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hangs.VARIABLE, str(LIMIT_S))
    with pytest.raises(MethodFault) as raised, limited("mine", "floor_bytes"):
        work()
    assert (raised.value.code, raised.value.method, raised.value.hook) == (HANGS, "mine", "floor_bytes")


def test_a_loop_of_another_thread_is_interrupted() -> None:
    ends: list[type[BaseException]] = []

    def work() -> None:
        watch = Watch(LIMIT_S)
        try:
            watch.begin("loop")
            try:
                loop()
            finally:
                watch.end()
        except Hang as error:
            ends.append(type(error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(60)
    assert ends == [Hang]


def test_a_thread_that_cannot_be_interrupted_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "TRIES", 1)
    names: list[str] = []
    told, woken = threading.Event(), threading.Event()

    def hear(name: str) -> None:
        names.append(name)
        told.set()

    def work() -> None:
        watch = Watch(LIMIT_S, "mine", give_up=hear)
        watch.begin("select")
        with suppress(Hang):
            woken.wait()

    threading.Thread(target=work, daemon=True).start()
    assert told.wait(60)
    woken.set()
    assert names == ["select"]


def test_an_interruption_that_comes_too_late_is_taken_back() -> None:
    watch = Watch(LIMIT_S)
    watch.begin("short")
    watch.tick(LIMIT_S / 2)
    watch.end()
    watch.tick(10 * LIMIT_S)
    assert watch.strikes == 0
    assert not watch.running


TRACED = """
import sys
from kvlens.hangs import Hang, Watch

def loop():
    while True:
        pass

watch = Watch(0.3)
watch.begin("loop")
try:
    try:
        loop()
    finally:
        watch.end()
except Hang:
    pass

def work():
    return 7

sys.settrace(lambda *event: None)
print(work())
"""


ASLEEP = """
import sys, time
from kvlens import hangs

try:
    hangs.within(0.3, "work", lambda: time.sleep(3600))
except hangs.Hang:
    pass

def work():
    return 7

sys.setprofile(lambda *event: None)
print(work())
"""


@pytest.mark.parametrize("program", [TRACED, ASLEEP], ids=["loop", "asleep"])
def test_a_tracer_goes_on_after_an_interruption(program: str) -> None:
    """A debugger or a coverage tool traces: it must not stand still because a call was interrupted before, or will be
    when it wakes."""
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    assert ran.stdout == "7\n"


def test_a_limit_of_zero_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(hangs.VARIABLE, "0")
    assert hangs.limit() is None
    monkeypatch.setenv(hangs.VARIABLE, "2.5")
    assert hangs.limit() == 2.5
    for text in ("soon", "-1", "nan", "inf"):
        monkeypatch.setenv(hangs.VARIABLE, text)
        with pytest.raises(ValueError, match=hangs.VARIABLE):
            hangs.limit()
    monkeypatch.delenv(hangs.VARIABLE)
    assert hangs.limit() == hangs.LIMITS[hangs.VARIABLE]


def test_work_in_a_thread_of_its_own() -> None:
    assert hangs.within(60, "work", lambda: 7) == 7
    with pytest.raises(KeyError):
        hangs.within(60, "work", lambda: {}["missing"])
    with pytest.raises(Hang):
        hangs.within(LIMIT_S, "work", sleep)


def test_a_hang_outside_the_hooks_becomes_a_fault() -> None:
    error = stray("mine", Hang())
    assert isinstance(error, MethodFault)
    assert (error.code, error.method) == (HANGS, "mine")
