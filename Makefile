# Every target that runs something makes its own .venv first: Python 3.11+, make and pip are all a machine needs.
#
#   make test ARGS='-k crash -x'      more words for pytest
#   make demo PYTHON=python3.11       another interpreter (then: rm -rf .venv)

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Four workers, since many tests wait for other processes; one file after the other in the order
# of tests/conftest.py.
PARALLEL := -n 4 --dist loadfile --no-loadscope-reorder
UNCOMPILED := tests|sklearn|fontTools|pip|setuptools|mypyc?|graphql|cfnlint|narwhals|huggingface_hub
UNCOMPILED := $(UNCOMPILED)|torch/(testing/_internal|_inductor)|moto/(iam|stepfunctions|ec2)
UNCOMPILED := $(UNCOMPILED)|pygments/lexers|sympy/physics|pytorch_lightning|lightning_fabric
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs-installed
INTEGRATIONS_STAMP := $(VENV)/.integrations-installed

# The environment of whoever calls must not reach into ours. Without compiled files each of the
# workers of pytest, and each process that they start, compiles what it imports.
unexport PYTHONHOME PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-tiers test test-fast coverage integrations torture safety stores check check-text check-mypy check-pyright check-protocol matrix lowest imports chaos bench licences docs build clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target words; do \
		printf '%-18s %s\n' "$$target" "$$words"; done

demo: $(STAMP) ## train on two ranks, be killed while a save streams, resume, compare
	$(BIN)/python examples/demo.py $(ARGS)

demo-tiers: $(STAMP) ## one training, three tiers (memory, disk, S3), killed and resumed from each
	$(BIN)/python examples/demo_tiers.py $(ARGS)

test: $(STAMP) ## all tests
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-fast: $(STAMP) ## the tests that take seconds
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" $(ARGS)

coverage: $(STAMP) ## all tests, and which lines and branches of the product they run; fails below the floor in pyproject.toml
	rm -rf .build/coverage
	mkdir -p .build/coverage
	$(BIN)/python -m coverage run -m pytest $(PARALLEL) $(ARGS); status=$$?; \
	$(BIN)/python -m coverage combine -q && $(BIN)/python -m coverage report && exit $$status

integrations: $(INTEGRATIONS_STAMP) ## the tests of the frameworks, with the real packages (installs them: 2 GB)
	$(BIN)/python -m pytest $(PARALLEL) --most-seconds 120 -rs tests/integrations tests/data tests/launch/test_kubernetes.py tests/launch/test_mpirun.py \
		tests/examples/test_without_torch_distributed.py $(ARGS)

torture: $(STAMP) ## minutes of kills and faults, hundreds at random moments
	$(BIN)/python -m pytest -m torture --tally bench/results/reliability.json -o faulthandler_timeout=1800 $(ARGS)

# The type checkers take most of the time, and one processor each: they run side by side. All parts
# run whichever fails, and each prints its output in one piece.
check: $(STAMP) ## format, lint, spelling, types (mypy and pyright, strict), layers
	@$(MAKE) --no-print-directory --jobs 2 --keep-going --output-sync=target check-mypy check-pyright check-text

check-mypy: $(STAMP)
	$(BIN)/mypy

check-pyright: $(STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

check-text: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	PYTHONPATH=.:backends $(BIN)/lint-imports --no-logo

safety: $(STAMP) ## measure what changes of a state give, into docs/safety.md
	$(BIN)/python -m tests.safety.page

stores: $(STAMP) ## measure real servers and mounts, into docs/stores.md (needs root and the programs that it names; 15 minutes)
	$(BIN)/python -m tests.stores.page $(ARGS)

census: $(STAMP) ## resume every optimizer of seven packages, into docs/safety.md (an hour; 60 MB in .build/census)
	$(BIN)/python -m tests.census.page $(ARGS)

matrix: $(STAMP) ## the tests on each release of torch, and restores between them (30 GB in .build, an hour)
	$(BIN)/python -m tests.versions.matrix $(ARGS)

lowest: $(STAMP) ## the quick tests with the lowest versions that pyproject.toml allows (1.4 GB in .build/lowest)
	$(BIN)/python -m tests.versions.lowest $(ARGS)

check-protocol: ## the commit protocol, model-checked with Spin (five minutes; spin and gcc)
	docs/protocol/check.sh

imports: $(STAMP) ## write folders with other libraries, import them, and write docs/imports.md (10 GB in .build)
	$(BIN)/python -m tests.exchange.folders.table $(ARGS)

chaos: $(STAMP) ## the crash test of ckpt-chaos, beside the saves of other libraries, into docs/reliability.md (20 minutes; 70 MB in .build/chaos)
	$(BIN)/python -m tests.chaos.page $(ARGS)

bench: $(STAMP) ## all scenarios against the peers: tables and plots in bench/results (25 minutes)
	$(BIN)/python -m bench all --out bench/results $(ARGS)

licences: $(STAMP) ## the table of docs/licences.md, from what is installed
	$(BIN)/python docs/licences.py

docs: $(DOCS_STAMP) ## the documentation site, in .build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open .build/site/index.html; the search needs a server: $(BIN)/python -m http.server -d .build/site"

# One call on a machine with an accelerator: its own Python and torch are used, nothing is installed. Both halves run whatever the first says.
DEVICE_PYTHON ?= python3
DEVICE_OUT ?= bench/results
device: ## where there is an accelerator: its tests, then its figures into bench/results/device.* (less than 9 minutes)
	@PYTHONPATH=.:backends:$$PYTHONPATH; export PYTHONPATH; status=0; \
	timeout 170 $(DEVICE_PYTHON) -m pytest tests/device -m device -rs -W default -p no:cacheprovider --timeout 90 || status=$$?; \
	timeout 370 $(DEVICE_PYTHON) -m bench device --out $(DEVICE_OUT) $(ARGS) || status=$$?; \
	exit $$status

build: $(STAMP) ## wheel and sdist in dist/
	$(BIN)/python -m build --no-isolation --outdir dist

clean: ## remove what the other targets made, except .venv and bench/results
	rm -rf runs/demo runs/demo-tiers
	rm -rf dist .build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name .git -prune -o -name '.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# pip installs PyTorch and uv, and uv the rest, in a tenth of the processor time that pip takes. If uv
# cannot, for example since it does not read the index of pip's configuration, pip installs the rest.
# The constraints of pip are variables, since an isolated build reads no -c: the second name is for pip 25.3 and later.
# uv compiles nothing, and pip with one processor, compileall with all of them. The status of compileall says only
# that some package has files of another Python. It leaves out what no target imports much of:
# Python compiles that when it is imported.
# At a terminal, pip shows what it downloads; a log needs none of that.
# The second way of making it is for systems whose Python has no ensurepip: the pip outside puts one inside.
$(STAMP): pyproject.toml constraints.txt
	@echo "making $(VENV): once; pip installs PyTorch and the test servers, which takes some minutes"
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install -q pip; }
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install $$([ -t 1 ] || echo -q) --no-compile --no-deps torch uv
	$(BIN)/uv pip install $$([ -t 1 ] || echo -q) --system-certs --python $(BIN)/python -c constraints.txt -b constraints.txt -e '.[dev]' || \
		PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m pip install $$([ -t 1 ] || echo -q) --no-compile -e '.[dev]'
	@echo "compiling what was installed"
	$(BIN)/python -m compileall -q -j 0 -x '/($(UNCOMPILED))/' $(VENV)/lib >/dev/null 2>&1 || true
	@touch $@

# The frameworks that the integrations lead to.
$(INTEGRATIONS_STAMP): $(STAMP)
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q -e '.[integrations]'
	@touch $@

# What only the site needs, which no test waits for.
$(DOCS_STAMP): $(STAMP)
	PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m pip install -q -e '.[docs]'
	@touch $@
