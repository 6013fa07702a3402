"""`python -m kvlens.lab.gpu`: as `kvlens bench gpu`, for a machine that has torch and Triton and little else of
kvlens's requirements."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvlens.lab.gpu.run import Request, measure, numbers, part_names
from kvlens.models.find import SMOLLM2


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvlens.lab.gpu", description="Measure a CUDA device; run again to continue."
    )
    parser.add_argument("--out", type=Path, default=Path("kvlens/lab/results"), help="folder of the result file")
    parser.add_argument("--minutes", type=float, default=10.0, help="no part is begun after this long")
    parser.add_argument(
        "--parts", default="", help="beginnings of parts' names, comma-separated, or whole names, by semicolons"
    )
    parser.add_argument("--contexts", default="", help="tokens, comma-separated")
    parser.add_argument("--batches", default="", help="sequences, comma-separated")
    parser.add_argument("--model", default=SMOLLM2, help="whose KV is offloaded: a name, a GGUF file or a folder")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU; the figures mean nothing")
    options = parser.parse_args()
    try:
        sizes = numbers(options.contexts), numbers(options.batches)
        parts, whole = part_names(options.parts)
        request = Request(options.out, options.minutes, parts, options.dry_run, *sizes, options.model, whole)
        print(measure(request, lambda line: print(line, file=sys.stderr, flush=True)).name)
    except (ValueError, OSError) as problem:
        print(f"kvlens: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
