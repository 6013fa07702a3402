"""What loading and listing do with crafted models.

    python -m benchmarks.damagemodels [--only WORD] [--out FILE]

Each crafted model of tests/fault/craftedmodels.py meets four consumers: the loader, the sizes that are asked before it,
the list of models, the reader of chat templates. A consumer works or raises UnsupportedModel; any other exception
counts as a traceback, more than LONGEST_S seconds as a hang. The command writes the counts that
`python -m kvlens.lab.studies.damage` draws as docs/evidence/damage.md.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.damage import write_rows
from tests.fault.craftedmodels import kinds, write_whole

OUT = Path("kvlens/lab/results/damage-models.json")
LONGEST_S = 40


class Hang(BaseException):
    """A consumer took too long."""


def outcome(consume: Callable[[], object]) -> str:
    """Return `loads`, `refused`, `hang`, or the exception."""
    from kvlens.models.errors import UnsupportedModel

    def stop(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LONGEST_S)
    try:
        consume()
    except UnsupportedModel:
        return "refused"
    except Hang:
        return "hang"
    except BaseException as error:
        return f"traceback {type(error).__name__}: {error}"[:300]
    finally:
        signal.alarm(0)
    return "loads"


def main() -> None:
    """Try every crafted model and write the outcomes."""
    from kvlens.engine.models import load
    from kvlens.models import catalogue
    from kvlens.models.sizes import sizes_in
    from kvlens.text.chat import template_in

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="kinds whose name holds this")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        base, folder = Path(name) / "whole", Path(name) / "model"
        base.mkdir()
        write_whole(base)
        load(str(base))
        for kind in kinds():
            if arguments.only not in kind.name:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            if kind.gguf:
                folder.mkdir()
            else:
                shutil.copytree(base, folder)
            kind.change(folder)
            model = str(folder / "model.gguf" if kind.gguf else folder)
            peak_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            consumers: dict[str, Callable[[], object]] = {
                "load": lambda model=model: load(model),  # type: ignore[misc]
                "list": lambda model=model: catalogue.entry(model),  # type: ignore[misc]
                "template": lambda: template_in(folder),
            }
            if not kind.gguf:
                consumers["sizes"] = lambda: sizes_in.__wrapped__(folder, 4)
            outcomes = {consumer: outcome(consume) for consumer, consume in consumers.items()}
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_before
            rows.append({"kind": kind.name, "group": kind.group, "outcomes": outcomes, "grown_bytes": grown * 1024})
            if any(text not in ("loads", "refused") for text in outcomes.values()):
                print(json.dumps(rows[-1]), flush=True)
    write_rows(arguments.out, rows)


if __name__ == "__main__":
    main()
