"""Which recorded signal foresees the loss of a step's token, over stored runs or over the kept trials of the ledger
study.

    python -m kvlens.lab.studies.foresight [RUNS] [--trials FILE] [--out FILE] [--picture FILE]

Every step that was compared with full KV counts: its token is lost if the run's most probable token is not full KV's.
Varentropy is recorded by no trace; kvlens.lab.studies.loss_ledger measures it, and --trials reads its trials.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvlens.lab.studies.ledger_table import tracks_of
from kvlens.lab.studies.rocpicture import picture
from kvlens.ledger.foresight import foresight, roc
from kvlens.ledger.tracks import tracks_of_runs
from kvlens.runs.folder import runs_folder
from kvlens.store.reader import list_runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="?", type=Path, default=None)
    parser.add_argument("--trials", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--picture", type=Path, default=None)
    options = parser.parse_args()
    if options.trials is not None:
        lines = options.trials.read_text(encoding="utf-8").splitlines()
        tracks = tracks_of([json.loads(line) for line in lines])
    else:
        folder = runs_folder(options.runs)
        tracks = tracks_of_runs(folder, map(str, list_runs(folder)["uid"]))
    table = foresight(tracks)
    for row in table:
        print(json.dumps(row))
    if options.out is not None:
        options.out.write_text(json.dumps(table, indent=1) + "\n")
    if options.picture is not None:
        options.picture.write_text(picture(roc(tracks), table), encoding="utf-8")


if __name__ == "__main__":
    main()
