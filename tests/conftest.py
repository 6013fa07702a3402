"""Shared by all tests: one torch thread (two busy cores are slower), a small random Llama, the demo model, a list as a
sink."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read when Triton is first imported, by whomever (transformers' Llama does): without a GPU its kernels are interpreted.
os.environ.setdefault("TRITON_INTERPRET", "0" if os.path.exists("/dev/nvidiactl") else "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("KVLENS_WARM", "off")  # a process of five seconds for those who do not ask for it
os.environ["KVLENS_MODEL"] = "demo"  # the toy unless a test names the real model: what is run where none is named

import gc
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from interpreted import quick_interpreter
from support import ListSink, Prompts, random_llama

CACHE = "KVLENS_TESTS_CACHE"
"""set by the process that made the folder of converted models: its workers share it, it removes it"""
OWNED = None if CACHE in os.environ else tempfile.mkdtemp(prefix="kvlens-tests-")
os.environ["KVLENS_CACHE"] = os.environ.setdefault(CACHE, OWNED or "")


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries look for what is left of them when the process ends
    if OWNED is not None:
        shutil.rmtree(OWNED, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, those with most of them before the others: workers are given files whole, and
    one that begins a long file last keeps the other waiting. The order within a file stays."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish() -> None:
    """The half a million objects of what was imported, which are never garbage, are not looked at each time; the rest
    is looked at far less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


if os.environ["TRITON_INTERPRET"] == "1":
    quick_interpreter()

# Timings never fail a test: the machine may be shared. The same examples every time, so that a change is judged by what
# it changes; `--hypothesis-profile=explore` looks for new ones.
settings.register_profile("kvlens", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None)
settings.load_profile("kvlens")


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """A library that was loaded on the way (UMAP's compiler) may have raised it: two threads of two workers wait for
    each other busily."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def ample_memory() -> Iterator[None]:
    """What is read once or twice, and what is warned of, depends on the free memory of the machine: here there is
    enough, whatever else runs."""
    from kvlens.models import sizes as weights
    from kvlens.runs import modelcheck, readings

    with pytest.MonkeyPatch.context() as patch:
        for module in (readings, modelcheck, weights):
            patch.setattr(module, "host_bytes", lambda: 1 << 40)
        yield


@pytest.fixture(scope="module")
def quick_gc() -> None:
    """For tests of what collects garbage often: as at the beginning, for what models are made of."""
    import transformers.models.llama.modeling_llama  # noqa: F401  (imported on the way otherwise)

    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def tiny() -> Any:
    """A random Llama of 3 layers, 8 query heads, 2 KV heads, in fp32, loaded as kvlens loads models."""
    return random_llama()


@pytest.fixture(scope="session")
def demo() -> Any:
    from kvlens.engine.models import load

    return load("demo")


@pytest.fixture(scope="session")
def prompts(demo: Any) -> Prompts:
    """Its prompts."""
    return Prompts(demo)


@pytest.fixture(scope="module")
def loaded_once(demo: Any) -> Iterator[None]:
    """For tests that carry out many runs by request: the toy is in memory, as in the app's warm process."""
    from kvlens.models import find

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find, "_kept", {})
        find.keep_model("demo", demo)
        yield


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The real model, converted once for all tests. Its package is installed by `make test`; without it this fails."""
    from kvlens.engine.models import load

    return load("smollm2")


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """Its folder, without loading it."""
    from kvlens.models.find import resolve

    return Path(resolve("smollm2"))


@pytest.fixture
def sink() -> ListSink:
    return ListSink()
