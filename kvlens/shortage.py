"""What a machine lacks, in one sentence, with the setting that asks for less."""

from __future__ import annotations

from kvlens.refusal import Refusal


class Shortage(Refusal):
    """The machine has too little of something, or lacks a feature: one sentence with what to do about it."""


NO_FEATURE = ("no kernel image", "driver version is insufficient", "not supported", "ptx", "active driver")
"""What a driver says that lacks a feature."""


def shortage(problem: BaseException, phase: str = "") -> Shortage | None:
    """`problem` as a Shortage, where it is one; None for everything else. phase: load, prefill, place, decode,
    store."""
    import torch

    if isinstance(problem, Shortage):
        return problem
    text = str(problem)
    head_item = next((line.strip() for line in text.splitlines() if line.strip()), type(problem).__name__)
    if isinstance(problem, torch.OutOfMemoryError):
        return Shortage(f"the device ran out of memory{_during(phase)} ({_cut(head_item)}); {_less(phase)}.")
    if (
        type(problem).__name__ == "OutOfMemoryException"
        or isinstance(problem, MemoryError)
        or "can't allocate memory" in text
    ):
        return Shortage(f"the host ran out of memory{_during(phase)}; {_less(phase)}.")
    if _lacking(problem):
        return Shortage(
            f"the device, its driver or Triton lacks what a kernel needs ({_cut(head_item)}); run with --device cpu."
        )
    if isinstance(problem, RuntimeError) and "cuda error" in text.lower():
        return Shortage(f"the CUDA device failed{_during(phase)} ({_cut(head_item)}); run again, or with --device cpu.")
    return None


def _lacking(problem: BaseException) -> bool:
    """Triton's own errors, Triton missing, and RuntimeErrors of a driver."""
    of_triton = type(problem).__module__.partition(".")[0] == "triton" or (
        isinstance(problem, ImportError) and problem.name == "triton"
    )
    return of_triton or (isinstance(problem, RuntimeError) and any(word in str(problem).lower() for word in NO_FEATURE))


def _during(phase: str) -> str:
    during = {
        "load": "loading the model",
        "prefill": "reading the prompt",
        "place": "placing the prompt",
        "decode": "decoding",
        "read": "reading",
    }
    return f" while {during[phase]}" if phase in during else ""


def _less(phase: str) -> str:
    if phase == "load":
        return "take a smaller model, --dtype bfloat16, or --device cpu"
    if phase == "read":
        return "close other programs, or ask for less: fewer runs, fewer steps, a smaller file"
    if phase == "decode":
        return "take a smaller --budget, --no-coverage (coverage keeps all keys), or a shorter prompt"
    return "take a shorter prompt, --dtype bfloat16, or --no-coverage (coverage keeps all keys)"


def _cut(sentence: str) -> str:
    """Its beginning: PyTorch's messages go on about allocator settings."""
    return sentence if len(sentence) <= 160 else f"{sentence[:157]}..."
