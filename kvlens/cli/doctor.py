"""Whether this installation works: versions, devices, and a short run that checks itself."""

from __future__ import annotations

import importlib.metadata
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from kvlens import __version__
from kvlens.budget import in_words
from kvlens.files import cache_dir
from kvlens.methods import DEFAULT
from kvlens.models.catalogue import label
from kvlens.models.find import DEMO, default_model
from kvlens.storeys import EXTRAS
from kvlens.text.plaintext import strict_json

STOCK = "FullKV equals the stock model"
"""name of a check"""
CORE = ("torch", "transformers", "tokenizers", "gguf", "duckdb", "pandas", "pyarrow")
OPTIONAL = {"triton": "triton", "streamlit": "streamlit", "plotly": "plotly", "umap-learn": "umap"}
"""distribution -> its module, of packages that an extra of kvlens installs"""
BUDGET = "50%"
"""of the short run: the share of full KV that the default method holds of the toy's prompt"""


@dataclass(frozen=True)
class Check:
    """A check of the installation. `detail` holds the figures that decided."""

    name: str
    passed: bool
    detail: str


def facts() -> dict[str, str]:
    """Return versions, devices, links and the models' cache by name."""
    import torch

    listed = {"kvlens": __version__, "python": platform.python_version()}
    listed |= {"system": platform.platform(terse=True)}
    listed |= {package: _version(package) or "missing" for package in CORE}
    for package, module in OPTIONAL.items():
        listed[package] = _version(package) or f"not installed (pip install 'kvlens[{EXTRAS[module]}]')"
    cuda = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count() if cuda else 0)]
    listed |= {"devices": ", ".join(["cpu", *names]), "threads": str(torch.get_num_threads())}
    listed |= {"default model": label(default_model()), "models' cache": str(cache_dir())}
    return listed | _tiers(cuda)


def checks() -> Iterator[Check]:
    """Carry out the checks and yield each as it ends: packages, the stock model's logits, a recorded run."""
    for package in CORE:
        version = _version(package)
        yield Check(f"package {package}", version is not None, version or "missing: pip install kvlens")
    yield _stock_equality()
    yield from _recorded_run()


def model_check(name: str) -> Check:
    """Compare a model's full KV with its own generate, past its RoPE border, and keep the verdict."""
    from kvlens.engine.engine import Engine
    from kvlens.engine.models import load
    from kvlens.models.device import AUTO, settle
    from kvlens.runs.modelcheck import EQUAL, check_model

    loaded = load(name, settle(AUTO), "float32")
    verdict = check_model(Engine(loaded), loaded.fingerprint())
    return Check(f"{name} equals its generate", verdict.verdict == EQUAL, verdict.sentence)


def examine_model(name: str, as_json: bool) -> bool:
    """Print the check of one model. Return True if it passed."""
    check = model_check(name)
    if as_json:
        typer.echo(strict_json({"checks": [asdict(check)]}))
    else:
        typer.echo(f"{'pass' if check.passed else 'FAIL'}  {check.name}: {check.detail}")
    return check.passed


def examine(as_json: bool) -> bool:
    """Print the facts, then each check as it ends; with `as_json` all in one object at the end. Return True if every
    check passed."""
    listed = facts()
    if not as_json:
        for name, value in listed.items():
            typer.echo(f"{name:16} {value}")
    ended = []
    for check in checks():
        ended.append(check)
        if not as_json:
            typer.echo(f"{'pass' if check.passed else 'FAIL'}  {check.name}: {check.detail}")
    if as_json:
        report = {"facts": listed, "checks": [asdict(check) for check in ended]}
        typer.echo(strict_json(report))
    return all(check.passed for check in ended)


def _version(package: str) -> str | None:
    """Return the installed version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tiers(cuda: bool) -> dict[str, str]:
    """Return the link and the kernels that a run on each kind of device uses."""
    import torch

    from kvlens.kernels.attend import planned_on
    from kvlens.link.transfers import link_name

    kinds = {f"run on {name}": torch.device(name) for name in ("cpu", "cuda")}
    return {
        name: f"link {link_name(device)}, attention {planned_on(device, 128)}"
        + ("" if device.type == "cpu" or cuda else " (no CUDA device here)")
        for name, device in kinds.items()
    }


def _stock_equality() -> Check:
    """Compare FullKV's logits with the stock model's."""
    from kvlens.runs.stock import stock_gap

    gap, tokens = stock_gap("cpu")
    detail = f"largest logit difference to the stock model {gap:g} (fp32, {tokens} tokens)"
    return Check(STOCK, gap == 0, detail)


def _recorded_run() -> Iterator[Check]:
    """Run the default method on the toy in a temporary folder, read its trace, and yield its self-checks."""
    from kvlens.budget import BudgetInfeasible
    from kvlens.runs.carrying import carry_out
    from kvlens.runs.request import RunRequest
    from kvlens.runs.stock import NEW, check_task
    from kvlens.store.reader import TraceReader
    from kvlens.text.prompts import PromptText

    request = RunRequest(model=DEMO, method=DEFAULT, budget=BUDGET, max_new=NEW, device="cpu")
    name = f"a run of {request.model} under {request.method} at budget {in_words(request.budget)}"
    with tempfile.TemporaryDirectory() as folder:
        runs, prompt = Path(folder), PromptText(check_task().text)
        try:
            uid, status, _ = carry_out(request, prompt, runs, lambda *_: None, lambda: False)
        except BudgetInfeasible as refused:
            yield Check(name, False, str(refused))
            return
        with TraceReader.open(runs, uid) as reader:
            complete = status == "completed" and reader.n_steps > 0
            yield Check(name, complete, f"status {status}, {reader.n_steps} steps read back from its trace")
            for row in reader.self_checks().itertuples():
                yield Check(str(row.name), bool(row.passed), str(row.detail))
