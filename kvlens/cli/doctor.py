"""Is this machine fit, and do the numbers add up here? Versions, devices, and a short run that checks itself."""

from __future__ import annotations

import importlib.metadata
import platform
import tempfile
from pathlib import Path
from typing import Any

from kvlens.models.cache import cache_dir
from kvlens.models.catalogue import label
from kvlens.models.find import default_model

PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "gguf",
    "triton",
    "duckdb",
    "streamlit",
    "plotly",
    "pandas",
    "pyarrow",
    "umap-learn",
)


def examine() -> dict[str, Any]:
    """Facts of the machine, and checks each with passed and detail."""
    import torch

    facts = {"python": platform.python_version(), "system": platform.platform(terse=True)}
    checks = []
    for package in PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            checks.append({"name": f"package {package}", "passed": False, "detail": "is not installed: run make app"})
    cuda = torch.cuda.is_available()
    facts["devices"] = ", ".join(
        ["cpu", *(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count() if cuda else 0))]
    )
    facts["threads"] = str(torch.get_num_threads())
    facts |= {"default model": label(default_model()), "models' cache": str(cache_dir())}
    facts |= _tiers(cuda)
    checks += _stock_equality() + _recorded_run()
    return {"facts": facts, "checks": checks}


def _tiers(cuda: bool) -> dict[str, str]:
    """Which link and kernels a run on each kind of device gets."""
    import torch

    from kvlens.kernels.attend import planned_on
    from kvlens.memory.cuda_link import link_name

    kinds = {f"run on {name}": torch.device(name) for name in ("cpu", "cuda")}
    return {
        said: f"link {link_name(device)}, attention {planned_on(device, 128)}"
        + ("" if device.type == "cpu" or cuda else " (no CUDA device here)")
        for said, device in kinds.items()
    }


def _stock_equality() -> list[dict[str, Any]]:
    from kvlens.runs.stock import stock_gap

    gap, tokens = stock_gap("cpu")
    detail = f"largest logit difference to the stock model {gap:g} (fp32, {tokens} tokens)"
    return [{"name": "FullKV equals the stock model", "passed": gap == 0, "detail": detail}]


def _recorded_run() -> list[dict[str, Any]]:
    from kvlens.runs.carrying import carry_out
    from kvlens.runs.request import RunRequest
    from kvlens.runs.stock import NEW, check_task
    from kvlens.store.reader import TraceReader
    from kvlens.text.prompts import PromptText

    text = check_task().text
    checks = []
    with tempfile.TemporaryDirectory() as folder:
        request = RunRequest(model="demo", max_new=NEW, device="cpu")
        uid, status, _ = carry_out(request, PromptText(text), Path(folder), lambda *_: None, lambda: False)
        with TraceReader.open(Path(folder), uid) as reader:
            detail = f"{reader.n_steps} steps read back, status {status}"
            checks.append(
                {
                    "name": "a trace is written and read",
                    "passed": status == "completed" and reader.n_steps > 0,
                    "detail": detail,
                }
            )
            for row in reader.self_checks().itertuples():
                checks.append({"name": row.name, "passed": bool(row.passed), "detail": row.detail})
    return checks
