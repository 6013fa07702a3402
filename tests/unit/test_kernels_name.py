"""The top-level folder kernels/ must not shadow a distribution named `kernels`, which transformers imports when it is
installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_distribution_named_kernels_and_our_folder_live_side_by_side(tmp_path: Path) -> None:
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text("MARK = 'the distribution'\n")
    info = tmp_path / "kernels-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kernels\nVersion: 9.9\n")
    code = (
        "import kernels; assert kernels.MARK == 'the distribution'\n"
        "import transformers, kvlens.engine.models, kvlens.kernels.attend, kvlens.store.reader\n"
        f"assert kvlens.kernels.attend.__file__.startswith({str(ROOT / 'kvlens' / 'kernels')!r})\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
