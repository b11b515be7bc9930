# Each target creates the environment it needs.  To use another Python: make PYTHON=python3.13 test

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
# One process more than cores: for a sixth of their time, tests wait for servers and time limits.
JOBS ?= $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) + 1)')
ARGS ?=

# The oldest supported google-adk, the last 1.x, and the newest below 3.
ADK_MATRIX := 1.28.0 1.39.1 newest
ADK ?= 1.28.0

BIN := .venv/bin
ALL_EXTRAS := .[artifacts,aws,gcp,mysql,pkcs11,postgresql,vault]
# An idle process takes tests over from a busy one.  Groups of tests that are fixed in advance left
# one process alone with the slow ones for minutes.
PYTEST_FLAGS = -n $(JOBS) --dist worksteal $(ARGS)
# The tests' databases are files in memory, if there is room: waiting for the disk took a sixth of a
# run.  No test cuts the power.
ifeq ($(origin TMPDIR),undefined)
TEST_TMPDIR := $(shell df --output=avail /dev/shm 2>/dev/null | awk 'NR == 2 && $$1 > 4000000 {print "/dev/shm"}')
PYTEST_ENV := $(TEST_TMPDIR:%=TMPDIR=%)
endif
# pytest keeps each module whose assertions it has rewritten: without, every process rewrites all of
# them, which takes 10 s.
export PYTHONDONTWRITEBYTECODE :=

# $(call make-venv,directory,requirements,options of uv): installs with uv, which is faster, or with
# pip if uv cannot be installed.
define make-venv
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "$(PYTHON) \
	is not Python 3.11 or later: install one, and name it, for example with \
	\`make PYTHON=python3.13 $(MAKECMDGOALS)\`" >&2; exit 1; }
	rm -rf $(1)
	$(PYTHON) -m venv $(1)
	if $(1)/bin/python -m pip install --quiet uv; \
	then $(1)/bin/uv pip install --quiet --python $(1)/bin/python $(3) $(2); \
	else $(1)/bin/python -m pip install --quiet 'pip>=25.1' && $(1)/bin/python -m pip install --quiet $(2); fi || { echo "The packages were not installed. \
	Behind a proxy, set HTTPS_PROXY: see docs/troubleshooting.md" >&2; exit 1; }
	touch $(1)/.installed
endef

ACTIONLINT := github.com/rhysd/actionlint/cmd/actionlint@v1.7.12

.PHONY: help demo test soak check lint lint-workflows types site docs a11y test-adk test-matrix bench
.PHONY: reliability endurance fuzz mutants
.PHONY: dist dist-check sbom release-requirements release-check release-notes clean

# Silences the warning that mkdocs-material will not support mkdocs 2.
export NO_MKDOCS_2_WARNING := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /|/' | \
	  while IFS='|' read -r name text; do printf '  make %-15s %s\n' "$$name" "$$text"; done

demo: .venv/.installed ## run an ADK agent whose conversation is stored encrypted, and look at its file
	$(BIN)/python examples/demo.py

test: .venv/.installed ## run all tests except those marked soak, benchmark or bench
	$(PYTEST_ENV) $(BIN)/python -m pytest $(PYTEST_FLAGS)

soak: .venv/.installed ## run the slow tests: all attacks on both database servers, more cases on each database
	$(PYTEST_ENV) $(BIN)/python -m pytest $(PYTEST_FLAGS) -m soak

check: lint types site ## run lint, types and site, then the tests with coverage
	$(PYTEST_ENV) $(BIN)/python -m pytest $(PYTEST_FLAGS) --cov --cov-report=term

lint: .venv/.installed ## check rules and formatting with ruff, workflows with zizmor, .ci with shellcheck
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/zizmor --quiet --offline --persona=pedantic .github
	$(BIN)/shellcheck .ci/*

lint-workflows: $(BIN)/actionlint ## check the workflows with actionlint, which needs Go
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/actionlint -color

types: .venv/.installed ## mypy --strict on all Python files, also as on Windows; every public name has a known type
	$(BIN)/mypy
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32 src
	report=$$(PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pyright --verifytypes adk_secure_sessions --ignoreexternal) || \
	  { echo "$$report" | grep error; exit 1; }

site: .venv/.installed ## build the documentation into site/; broken links are errors
	$(BIN)/mkdocs build --strict

docs: .venv/.installed ## serve the documentation at http://127.0.0.1:8000 and rebuild it on every change
	$(BIN)/mkdocs serve --strict

# With ARGS, only those pages: make a11y ARGS=benchmarks.html.
a11y: site ## check every page of the site in Chromium: axe-core, keyboard, wide and narrow, light and dark
	$(BIN)/python -m tests.accessibility site $(ARGS)

test-adk: .venv-adk-$(ADK)/.installed ## run the tests with one google-adk release: make test-adk ADK=1.28.0
	$(PYTEST_ENV) .venv-adk-$(ADK)/bin/python -m pytest $(PYTEST_FLAGS)

test-matrix: $(ADK_MATRIX:%=test-matrix-%) ## run the tests with the oldest, last 1.x and newest google-adk

test-matrix-%:
	$(MAKE) test-adk ADK=$*

# The environment variable BENCH_SECONDS (default 2.5) is the duration of each comparison with ADK.
# To run a part and leave the page and results unchanged: make bench ARGS='-k "postgresql and get"'.
# The deployments are sqlite, postgresql and remote.  To replace some figures of the page:
# make bench ARGS='-k conversation --update benchmarks/results.json', then
# python -m tests.benchmarks.report.
bench: .venv/.installed ## measure speed, memory and storage; write benchmarks/results.json and its page
	$(BIN)/python -m pytest tests/benchmarks -m "benchmark or bench" -v --log-cli-level=INFO \
	  --log-cli-format='%(message)s' $(or $(ARGS),--results benchmarks/results.json)
	$(if $(ARGS),,$(BIN)/python -m tests.benchmarks.report)

# The tests that inject faults, with all their long forms: half an hour.  To run a part and update its
# rows of the page: make reliability ARGS='-k kill'.
RELIABILITY := tests/reliability $(addprefix tests/on_servers/test_,restarts.py lost_connections.py pool.py database_errors.py)
reliability: .venv/.installed ## inject every fault; write reliability/results.json and its page
	$(PYTEST_ENV) $(BIN)/python -m pytest $(RELIABILITY) -m 'soak or not soak' $(ARGS) \
	  -o faulthandler_timeout=0 --deselect tests/reliability/test_report.py --outcomes reliability/results.json
	$(BIN)/python -m tests.benchmarks.report

# Traffic and all maintenance at once, on each database for ENDURANCE_SECONDS: three hours.
# For one database: make endurance ARGS='-k postgresql'.
endurance: export ENDURANCE_SECONDS ?= 3600
endurance: .venv/.installed ## run the tests with traffic and maintenance for an hour on each database
	$(PYTEST_ENV) $(BIN)/python -m pytest tests/reliability/test_mixed_traffic.py -m soak $(ARGS) \
	  -o faulthandler_timeout=0 --outcomes reliability/results.json
	$(BIN)/python -m tests.benchmarks.report

# TIME is in seconds and for all targets together.  RUNS is the number of inputs for each target, in
# place of TIME.  With ARGS, only those targets: make fuzz TIME=600 ARGS="record event".
fuzz: .venv-fuzz/.installed ## look for inputs that break a parser, with atheris; 60 s, or TIME=600
	.venv-fuzz/bin/python -m tests.fuzz $(if $(RUNS),--runs $(RUNS),--time $(or $(TIME),60)) $(ARGS)

# With ARGS, only those modules: make mutants ARGS=formats/records.py.
mutants: .venv-fuzz/.installed ## change formats, keys, backends and crypto in thousands of ways: does a test fail?
	$(PYTEST_ENV) .venv-fuzz/bin/python -m tests.mutation $(ARGS)

# Both use the tools of release/requirements.txt alone, whose versions and hashes are pinned.
dist: .venv-release/.installed ## build the source distribution and the wheel into dist/, twice: equal bytes
	rm -rf dist
	.venv-release/bin/python -m release.build dist
	.venv-release/bin/twine check --strict dist/*

dist-check: .venv/.installed ## install both in clean environments, with each extra alone, and try them
	$(PYTEST_ENV) $(BIN)/python -m pytest tests/test_packaging.py tests/test_installing.py \
	  -m 'soak or not soak' $(ARGS)

sbom: dist ## write dist.cdx.json (CycloneDX): the packages that the wheel brings; check their licences
	.venv-release/bin/python -m release.sbom dist/*.whl dist.cdx.json

release-requirements: .venv/.installed ## pin the newest tools that build a release, with their hashes
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --upgrade --generate-hashes --no-header \
	  --no-annotate --output-file release/requirements.txt release/requirements.in >/dev/null

release-check: .venv/.installed ## say what prevents a release
	$(BIN)/python -m release.check

release-notes: .venv/.installed ## write the changelog of this version to release-notes.md
	$(BIN)/python -m release.check --notes release-notes.md

clean: ## remove environments, caches and reports
	rm -rf .venv .venv-adk-* .venv-fuzz .venv-release .coverage .coverage.* htmlcov build dist dist.cdx.json release-notes.md site
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests examples release typing_tests -name __pycache__ -prune -exec rm -rf {} +

.venv/.installed: pyproject.toml
	$(call make-venv,.venv,-e '$(ALL_EXTRAS)' --group dev)

.venv-fuzz/.installed: pyproject.toml
	$(call make-venv,.venv-fuzz,-e '$(ALL_EXTRAS)' --group fuzz)

.venv-release/.installed: release/requirements.txt
	rm -rf .venv-release
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --require-hashes --requirement release/requirements.txt
	touch .venv-release/.installed

$(BIN)/actionlint: | .venv/.installed
	GOBIN=$(CURDIR)/$(BIN) go install $(ACTIONLINT)

.venv-adk-%/.installed: pyproject.toml
	$(call make-venv,.venv-adk-$*,-e '$(ALL_EXTRAS)' --group test 'google-adk$(if $(filter newest,$*),<3,==$*)')

# The oldest google-adk is tested with the oldest versions that pyproject.toml allows.
.venv-adk-1.28.0/.installed: pyproject.toml
	$(call make-venv,.venv-adk-1.28.0,-e '$(ALL_EXTRAS)' --group test google-adk==1.28.0,--resolution lowest-direct)
