"""Which groups of tests there are, and which sources each proves (tests/proved.py)."""

from __future__ import annotations

from testgroup import Group

CORE = (
    "kvlens/**/*.py",
    "kvlens/**/*.toml",
    "kvlens/demo/weights/*",
    "kvlens/methods/**/*.json",
    "kvlens/methods/**/*.safetensors",
    "kvlens/player/web/*",
    "kvlens/tasks/corpus/*",
    "kvlens/trace/*.json",
    "kernels/**/*.py",
    "store/**/*.py",
    "tests/*.py",
    "pyproject.toml",
    "requirements*.txt",
)
"""code and data of what runs models; the app is left out, and the lab where no test of a group runs it"""
APP, LAB, GPU = "kvlens/app/", "kvlens/lab/", "kvlens/lab/gpu/"
TASKS = ("kvlens/app/__init__.py", "kvlens/lab/__init__.py", "kvlens/lab/tasks/*.py")
COMMANDS = ("kvlens/app/__init__.py", "kvlens/app/commands/*.py", "kvlens/lab/commands/*.py")
"""of the storeys above, what the core and what every command loads by a fixed name (kvlens/storeys.py)"""
APP_FILES = ("kvlens/app/**/*.css", "kvlens/app/**/*.html", "kvlens/app/**/*.js*", "kvlens/app/**/*.svg")
"""what pages and reports are made of beside code"""
HELPERS = ("tests/unit/*_reference.py", "tests/unit/*_trial.py")
CORE_LENS = (
    *("counterfactual", "effect", "fewest_bytes", "holds", "ledger_files", "loss", "loss_ledger", "ranking"),
    *("sampled_losses", "span_readers", "states_truth"),
)
CORE_UNIT = (
    *("arkvale", "border", "chat", "chess", "clusterkv", "compresskv", "condition", "cuda_link"),
    *("decode_eviction", "freekv", "freekv_layout", "holdings", "infllm", "kivi", "lowrank", "observing"),
    *("page_retrieval", "pqcache", "preflight", "prompt_eviction", "prompt_eviction_baselines", "raas", "recall_zone"),
    *("reference_reading", "rocketkv", "room", "rotary", "score_methods", "sekv_codec", "semanticache"),
    *("sentencekv", "sentkv", "shadowkv", "single_run", "sparq", "surprisal", "token_retrieval"),
    *("trace_roundtrip", "turboquant"),
)

WHOLE = tuple(
    f"tests/unit/test_{name}.py"
    for name in (
        *("architecture", "contributing", "docs_pages", "glossary", "import_lines", "mutations", "packaging"),
        *("page_strings", "proved", "readme", "release", "resolve", "vaguenames", "words"),
    )
)
"""tests of the repository as a whole: its pages, its names, its packages; in no group"""

GROUPS = {
    # What methods keep, recall and attend, how runs go, and what the lens finds: tests of the core alone.
    "core": Group(
        (
            "tests/truths/test_*.py",
            *(f"tests/lens/test_{name}.py" for name in CORE_LENS),
            *(f"tests/unit/test_{name}.py" for name in CORE_UNIT),
        ),
        (*HELPERS, "tests/lens/*.py", "tests/synthetic/*.py", *TASKS),
        CORE,
        (APP, LAB),
    ),
    # The lens by its commands, and its reasons as the app reads them.
    "lens": Group(
        tuple(
            f"tests/lens/test_{name}.py"
            for name in ("diagnosis", "otherwise", "reasons", "reasons_truth", "reference", "repeat", "tips")
        ),
        ("tests/lens/*.py", "tests/synthetic/*.py", *APP_FILES),
        CORE,
    ),
    "kernels": Group(
        ("tests/kernels/test_*.py",),
        (
            "kernels/**/*.py",
            "kvlens/lab/__init__.py",
            "kvlens/lab/gpu/**/*.py",
            "kvlens/lab/results/*.py",
            "kvlens/memory/*.py",
            "kvlens/tiers/*.py",
            "kvlens/link/*.py",
            "tests/kernels/*.py",
            "tests/interpreted.py",
            "tests/lowrank_unit.py",
            "requirements*.txt",
            "docs/evidence/kernels.md",
        ),
        CORE,
        (APP, LAB),
    ),
    "device": Group(
        ("tests/static/test_*.py", "tests/unit/test_bench_gpu*.py"),
        ("kvlens/lab/results/*.json*", "kvlens/app/gallery/*.json", "docs/evidence/performance.md", *COMMANDS),
        CORE,
        (APP,),
    ),
    # Code of README, docs and notebooks, and the sample prompt, on the real model.
    "examples": Group(
        (
            "tests/api/test_docs.py",
            "tests/api/test_notebooks.py",
            "tests/api/test_first_example.py",
            "tests/unit/test_readme_runs.py",
            "tests/unit/test_smollm2.py",
        ),
        (
            "README.md",
            "docs/api.md",
            "notebooks/*.ipynb",
            "tests/api/conftest.py",
            "kvlens/lab/results/*.json*",
            *APP_FILES,
            *TASKS,
            *COMMANDS,
        ),
        CORE,
        (LAB,),
    ),
    # How runs are carried out: studies, workers, gates, races, kept readings.
    "carrying": Group(
        (
            "tests/unit/test_gate.py",
            "tests/unit/test_passage.py",
            "tests/unit/test_race.py",
            "tests/unit/test_readings.py",
            "tests/unit/test_studies.py",
            "tests/unit/test_study_workers.py",
        ),
        ("docs/studies.md", "docs/architecture.md", *COMMANDS),
        CORE,
        (GPU,),
    ),
    # Processes of the app: the one that jobs are forked from, and the soak, which opens pages.
    "processes": Group(
        ("tests/unit/test_warm.py", "tests/fault/test_soak.py"),
        ("benchmarks/soak*.py", *APP_FILES, "kvlens/lab/results/*.json*", "tests/fault/*.py", "tests/synthetic/*.py"),
        CORE,
    ),
    # What pages say, in Streamlit's own test runner.
    "pages": Group(
        ("tests/apptest/test_*.py",),
        (
            *APP_FILES,
            "kvlens/app/**/*.toml",
            "kvlens/app/**/*.xz",
            ".streamlit/*",
            "app.py",
            "pages/*.py",
            "kvlens/lab/results/*.json*",
            "tests/apptest/*.py",
            "tests/plugin/*",
            "tests/synthetic/*.py",
        ),
        CORE,
    ),
    # What mypy says of every file; with it the test that it sees across borders.
    "types": Group(
        ("tests/unit/test_types_border.py",),
        (
            "kvlens/**/*.py",
            "kernels/**/*.py",
            "store/**/*.py",
            "pages/*.py",
            "benchmarks/*.py",
            "app.py",
            "tests/**/*.py",
            "pyproject.toml",
            "requirements*.txt",
        ),
    ),
    # Benchmarks, claims, training and calibration: tools of the lab.
    "lab": Group(
        (
            "tests/unit/test_bench_cli.py",
            "tests/unit/test_bench_rates.py",
            "tests/unit/test_*_calibration.py",
            "tests/unit/test_claims_parts.py",
            "tests/unit/test_freetext.py",
            "tests/unit/test_ledger_study.py",
            "tests/unit/test_plugin_lies.py",
            "tests/unit/test_real_model_ratios.py",
            "tests/unit/test_sekv_training.py",
            "tests/unit/test_sweep.py",
            "tests/lens/test_explain.py",
        ),
        (
            "benchmarks/*.py",
            "benchmarks/*.toml",
            "docs/evidence/*",
            "kvlens/lab/results/*.json*",
            "tests/synthetic/*.py",
            "tests/unit/test_cli.py",
            *HELPERS,
            *COMMANDS,
        ),
        CORE,
        (APP,),
    ),
}
# What a person does, in a browser.
GROUPS["browsers"] = Group(
    ("tests/browser/test_*.py",),
    (
        *APP_FILES,
        "kvlens/app/**/*.toml",
        "kvlens/app/**/*.xz",
        ".streamlit/*",
        "app.py",
        "pages/*.py",
        "kvlens/lab/bench/tables/*.toml",
        "kvlens/lab/results/*.json*",
        "tests/browser/*.py",
        "tests/plugin/*",
        "tests/synthetic/*.py",
    ),
    CORE,
)
# All other tests but those of WHOLE.
GROUPS["others"] = Group(
    tuple(f"tests/{folder}/test_*.py" for folder in ("api", "fault", "lens", "tasks", "unit")),
    (
        *GROUPS["browsers"].sources,
        "kvlens/**/*.js*",
        "kvlens/**/*.txt",
        "kvlens/**/*.xz",
        "kvlens/py.typed",
        "benchmarks/*.py",
        "benchmarks/*.toml",
        "docs/*.md",
        "docs/evidence/*",
        "LICENSE",
        "package*.json",
        "tests/presses/**/*.py",
        "tests/*/*.js*",
        "tests/*/*.py",
        "tests/*.sql",
        "tests/*.txt",
    ),
    CORE,
    but=(*WHOLE, *(pattern for group in GROUPS.values() for pattern in group.tests)),
)
