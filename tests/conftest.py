"""Shared by all tests: one torch thread (two busy cores are slower), a small random Llama, the demo model, a list as a
sink."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Read when Triton is first imported, by whomever (transformers' Llama does): without a GPU its kernels are interpreted.
os.environ.setdefault("TRITON_INTERPRET", "0" if os.path.exists("/dev/nvidiactl") else "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from typing import Any

import pytest
import torch
from hypothesis import settings
from support import ListSink, random_llama

settings.register_profile("kvlens", deadline=None)  # timings never fail a test: the machine may be shared
settings.load_profile("kvlens")


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """A library that was loaded on the way (UMAP's compiler) may have raised it: two threads of two workers wait for
    each other busily."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny() -> Any:
    """A random Llama of 3 layers, 8 query heads, 2 KV heads, in fp32, loaded as kvlens loads models."""
    return random_llama()


@pytest.fixture(scope="session")
def demo() -> Any:
    from kvlens.engine.models import load

    return load("demo")


@pytest.fixture
def sink() -> ListSink:
    return ListSink()
