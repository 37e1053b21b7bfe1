# `make serve` and `make test` set up what they need in .venv and run; `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
ARCHS ?= sm_80 sm_90a sm_120
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: help serve test test-web test-faults test-lm-eval test-ray test-long lint format bench plots kernels hip-check clean

help:
	@echo "make serve [ARGS='--model-path M.pth --password P']   serve a model"
	@echo "make test          lint and run the tests that need no GPU (minutes)"
	@echo "make test-web      drive the page in a browser (skipped by name where chromium is not installed)"
	@echo "make test-faults   kill, hang and flood the processes of a server, then those of two behind HAProxy (skipped by name without it)"
	@echo "make test-lm-eval  compare lm-evaluation-harness with the model in this process, and try instructor, in an environment of their own"
	@echo "make test-ray      run deploy/ray_serve.py under Ray, in an environment of its own"
	@echo "make test-long     run them with their full counts and write test/results/long.txt"
	@echo "make bench         measure this machine's CPU against the PyPI package rwkv"
	@echo "make plots         draw the figures of bench/results as docs/img/plot-*.svg"
	@echo "make kernels       compile the CUDA sources (with pip's nvcc if there is no other); make hip-check: the HIP ones (needs hipcc)"
	@echo "make lint, format  check or rewrite the style"
	@echo "PYTHON=python3.12 make ...   with another Python; a torch it already has is used, never replaced"

serve: $(VENV)/.ready
	$(BIN)/python app.py $(ARGS)

# Bytecode is kept even where the environment says no: the tests start some two hundred Python processes.
unexport PYTHONDONTWRITEBYTECODE
LONG := -p no:rerunfailures -m "not gpu and not lm_eval and not ray" --timeout 3600 --disable-warnings --hypothesis-profile long

# Three at once, for two cores: the tests of servers wait much.
test: $(VENV)/.ready-test lint
	$(BIN)/python -m pytest -n 3

test-web: $(VENV)/.ready-web
	$(BIN)/python -m pytest -m "web and not long" test/web

test-faults: $(VENV)/.ready-test
	$(BIN)/python -m pytest -n 3 -m "faults and not long" test
	KILLS=10 $(BIN)/python -m pytest -m long -k again_and_again test/live/test_live_cluster.py

test-lm-eval: $(VENV)/.ready-test $(VENV)/lm-eval/.ready
	LM_EVAL=$(abspath $(VENV))/lm-eval/bin/lm_eval $(BIN)/python -m pytest -m lm_eval test/live/test_live_lm_eval.py

test-ray: $(VENV)/.ready-test $(VENV)/ray/.ready
	RAY_PYTHON=$(abspath $(VENV))/ray/bin/python $(BIN)/python -m pytest -m ray test/live/test_live_ray.py

# Here the live server is held to its bounds on time, so its tests run alone.
test-long: $(VENV)/.ready-web lint
	mkdir -p test/results
	$(BIN)/python -m pytest -n 2 $(LONG) --ignore test/live --ignore test/web > test/results/long.txt; status=$$?; \
	STRICT_TIMES=1 $(BIN)/python -m pytest $(LONG) test/live >> test/results/long.txt || status=1; \
	$(BIN)/python -m pytest $(LONG) test/web >> test/results/long.txt || status=1; \
	grep -E "passed|failed|FAILED" test/results/long.txt; exit $$status

lint: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo --no-cache

format: $(VENV)/.ready-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.ready-test
	$(BIN)/python bench/cpu.py $(ARGS)

plots: $(VENV)/.ready-web
	$(BIN)/python bench/plots.py $(ARGS)

kernels: $(VENV)/.ready-nvcc
	$(BIN)/python -m rwkv_batch.kernels.compiler cuda $(ARCHS)

hip-check: $(VENV)/.ready
	$(BIN)/python -m rwkv_batch.kernels.compiler hip gfx90a gfx1030

clean:
	rm -rf $(VENV)

# Where the chosen Python has torch, the environment sees it and torch's pin is left out, so that pip keeps it.
$(VENV)/constraints.txt: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=..."; exit 1; }
	@if $(PYTHON) -c 'import torch' 2> /dev/null; then \
		echo "using the torch of $(PYTHON)"; \
		$(PYTHON) -m venv --system-site-packages $(VENV) && grep -v '^torch==' constraints.txt > $@; \
	else \
		$(PYTHON) -m venv $(VENV) && cp constraints.txt $@; \
	fi

$(VENV)/.ready: requirements.txt $(VENV)/constraints.txt
	@echo "installing into $(VENV) (torch is the large part)"
	$(PIP) -r requirements.txt -c $(VENV)/constraints.txt
	@touch $@

# pip's nvcc, where there is no other.
$(VENV)/.ready-nvcc: requirements-cuda.txt $(VENV)/.ready
	@$(BIN)/python -c 'from rwkv_batch.kernels.compiler import find_nvcc; find_nvcc()' 2> /dev/null || { \
		grep -E '^nvidia-(cuda|nvvm)' requirements-cuda.txt > $(VENV)/nvcc.txt && $(PIP) -r $(VENV)/nvcc.txt; }
	@touch $@

$(VENV)/.ready-test: requirements-test.txt requirements-grammar.txt requirements-cluster.txt requirements-encryption.txt $(VENV)/.ready
	$(PIP) -r requirements-test.txt -c $(VENV)/constraints.txt
	@touch $@

$(VENV)/lm-eval/.ready: requirements-lm-eval.txt $(VENV)/.ready-test
	$(BIN)/python -m venv $(VENV)/lm-eval
	$(VENV)/lm-eval/bin/python -m pip --disable-pip-version-check install --quiet -r requirements-lm-eval.txt
	@touch $@

$(VENV)/ray/.ready: requirements-ray.txt
	$(PYTHON) -m venv $(VENV)/ray
	$(VENV)/ray/bin/python -m pip --disable-pip-version-check install --quiet -r requirements-ray.txt
	@touch $@

$(VENV)/.ready-web: requirements-web.txt $(VENV)/.ready-test
	$(PIP) -r requirements-web.txt -c $(VENV)/constraints.txt
	@touch $@
