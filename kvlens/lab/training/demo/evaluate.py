"""Measure the demo model and write the tables of docs/evidence/demo-model.md.

`python -m kvlens.lab.training.demo.evaluate` replaces what stands between the two marks of that file. All values of
the prompts are drawn afresh from the seed.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from kvlens.demo import demo_path, language
from kvlens.lab.training.demo.measures import (
    DEPTHS,
    Demo,
    by_depth,
    controls,
    mean,
    over_depths,
    real_haystack,
    retrieval_heads,
    streaming,
    surprisal,
)

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
Section = Callable[[Demo, Path, Callable[[int], int]], str]


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return (
        "\n".join(
            "| " + " | ".join(f"{x:.3f}" if isinstance(x, float) else str(x) for x in line) + " |" for line in lines
        )
        + "\n"
    )


def _exact(demo: Demo, path: Path, n: Callable[[int], int]) -> str:
    rows = []
    for task, length in [(task, length) for task in ("needle", "multikey") for length in (512, 1024, 2048, 4096)]:
        right = by_depth(demo, task, length, n(20))
        rows.append([task, length, *right, mean(right), 5 * n(20)])
    return table(["task", "tokens", *(f"{d:.0%}" for d in DEPTHS), "mean", "n"], rows)


def _long(demo: Demo, path: Path, n: Callable[[int], int]) -> str:
    pairs: list[tuple[str, str, dict[str, int]]] = [
        (f"chain of {hops}", "chain", {"hops": hops}) for hops in (2, 3, 4, 6)
    ]
    pairs += [(f"list of {items}", "list", {"items": items}) for items in (4, 8, 12)]
    pairs += [("note recital", "note", {})]
    rows = [
        [name, *(over_depths(demo, task, t, n(20), **more) for t in (512, 1024, 2048)), n(20)]
        for name, task, more in pairs
    ]
    return table(["task", "512", "1024", "2048", "n each"], rows)


def _kinds(demo: Demo, path: Path, n: Callable[[int], int]) -> str:
    kinds = language.FACT_KINDS[:-1]
    rows = [[kind, over_depths(demo, "multikey", 1024, n(20), kind=kind, others=4), n(20)] for kind in kinds]
    return table(["kind", "exact match", "n"], rows)


def _controls(demo: Demo, path: Path, n: Callable[[int], int]) -> str:
    removed, follows = controls(demo, 1024, n(50))
    rows = [["needle removed", removed, n(50)], ["digits replaced: the answer follows", follows, n(50)]]
    rows.append(["haystack of held-out real English", real_haystack(demo, 1024, n(50)), n(50)])
    return table(["control", "exact match", "n"], rows)


def _streaming(demo: Demo, path: Path, n: Callable[[int], int]) -> str:
    rows = [[t, *by_depth(demo, "multikey", t, n(10), streaming(0.1)), n(10)] for t in (512, 1024, 2048)]
    return table(["tokens", *(f"{d:.0%}" for d in DEPTHS), "n each"], rows)


def _surprisal(demo: Demo, path: Path, n: Callable[[int], int]) -> str:
    rows = [
        ["uniform, ln V", math.log(len(demo.tokenizer)), ""],
        *([k, v, c] for k, (v, c) in sorted(surprisal(demo).items())),
    ]
    return table(["tokens", "nats per token", "count"], rows)


def _heads(demo: Demo, path: Path, n: Callable[[int], int]) -> str:
    heads = retrieval_heads(path, 1024, n(20))
    rows = [[f"layer {index}", *map(float, row)] for index, row in enumerate(heads)]
    return table(["", *(str(head) for head in range(heads.size(1)))], rows)


SECTIONS: dict[str, Section] = {
    "Exact match by length and depth, full KV": _exact,
    "Long answers (exact match; lists: share of entries right)": _long,
    "By kind of fact, 1024 tokens, four others of the kind": _kinds,
    "Controls, 1024 tokens": _controls,
    "4 first and the latest tokens, 10 % of the entries, multikey": _streaming,
    "Surprisal on held-out real English": _surprisal,
    "Attention mass on the value per right digit, by query head": _heads,
}


def measure(path: Path, scale: float, say: Callable[[str], None]) -> str:
    """All tables as markdown; `scale` shrinks the numbers of trials."""
    demo = Demo.load(path)
    parts: list[str] = []
    for title, section in SECTIONS.items():
        parts.append(f"### {title}\n\n{section(demo, path, lambda count: max(1, round(count * scale)))}")
        say(parts[-1])
    return "\n".join(parts)


def evaluate_demo(path: Path, doc: Path | None = None, scale: float = 1.0, say: Callable[[str], None] = print) -> str:
    """Measure the model folder; with `doc`, put the tables between the marks of that file."""
    start_time = time.time()
    text = measure(path, scale, say)
    say(f"{(time.time() - start_time) / 60:.1f} minutes")
    if doc is not None:
        old = doc.read_text()
        begin, end = old.index(BEGIN) + len(BEGIN), old.index(END)
        doc.write_text(old[:begin] + "\n" + text + old[end:])
    return text


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Measure the demo model.")
    parser.add_argument("--model", type=Path, default=demo_path())
    parser.add_argument("--doc", type=Path, help="markdown file with the two marks, for example evidence/demo-model.md")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full numbers of trials")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    evaluate_demo(arguments.model, arguments.doc, arguments.scale)


if __name__ == "__main__":
    main()
