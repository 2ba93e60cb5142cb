# Everything runs in .venv, which the first target that needs it makes.  `make demo` is the place to start.

# With it set, every import of torch and transformers compiles them anew: 16 s instead of 4.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
# Where there is no NVIDIA driver, torch's CPU build (0.2 GB) does all that the CUDA build (3 GB) would.
TORCH ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo test test-gymnasium test-browser test-scale test-walk faults test-vllm test-wheel soak check lint format types docs dist families bench trl-parity trl-scripts trl-tests mutants constraints clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

demo: .venv/.ok ## install, then train the bundled model on Countdown and show it before and after; an earlier runs/demo goes
	$(BIN)/posttrain rl recipes/countdown-tiny.yaml --run.folder runs/demo --run.overwrite

test: .venv/.ok ## the whole test suite: no network, no GPU
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations=10

test-gymnasium: .venv/.ok .gymnasium-0.29/.ok ## the tests of inverse RL once more, on gymnasium 0.29
	PYTHONPATH=.gymnasium-0.29 $(BIN)/python -m pytest -n 2 -k irl

test-browser: .venv/.ok ## the voting page and the viewer in a headless Chromium, and in Firefox where there is one (POSTTRAIN_CHROMIUM, POSTTRAIN_FIREFOX)
	$(BIN)/python -m pytest -rs tests/end_to_end/test_ballot_browser.py tests/end_to_end/test_viewer_browser.py tests/end_to_end/test_viewer_kinds_browser.py tests/end_to_end/test_viewer_firefox.py

test-vllm: .venv/.ok ## servers' tests against vLLM's CPU build, in an environment of its own (3.4 GB); says what it skips where there is none
	$(BIN)/python -m tests.vllm_suite

test-scale: .venv/.ok ## faults of servers, ranks, environments and disks in every phase, 20 random ones over whole runs, the pages of mistakes
	$(BIN)/python -m pytest -n 2 -m scale tests/faults tests/test_course_pages.py
	$(BIN)/python -m tests.faults.chaos --faults 20

test-walk: .venv/.ok ## the commands of README and the first pages, one after another, as a newcomer types them
	$(BIN)/python -m pytest -m scale tests/end_to_end/test_newcomer_walk.py

test-wheel: .venv/.ok ## the wheel in an environment of its own, with its dependencies alone; downloads as much as the first `make`
	$(BIN)/python -m pytest -m scale tests/end_to_end/test_clean_install.py

faults: .venv/.ok ## 200 random faults over whole runs: servers, networks, ranks and drivers that are killed, stopped and cut off
	$(BIN)/python -m tests.faults.chaos --faults 200

soak: .venv/.ok ## a hundred thousand programs, and completions through workers, and what they leave behind
	$(BIN)/python -m tests.soak --items 100000

check: lint types test test-walk ## what CI runs: lint, format, types, tests, and the documentation with lessons on tiny settings
	POSTTRAIN_TINY=1 $(MAKE) docs

lint: .venv/.ok ## style, and whether the code is formatted
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: .venv/.ok ## mend what lint can mend
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

types: .venv/.ok ## static types of src, strictly, of what README shows, and names that benchmarks use
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini benchmarks
	$(BIN)/python -m tests.typed_pages

docs: .venv/.ok ## the documentation, in docs/_build; a warning or a misspelling is an error
	$(BIN)/codespell README.md CONTRIBUTING.md SECURITY.md CHANGELOG.md docs src recipes
	rm -rf docs/api
	$(BIN)/sphinx-build -E -W --keep-going -q docs docs/_build
	@echo docs/_build/index.html

dist: docs ## what a release holds, in dist/: wheel, source, and this version's documentation as one zip file
	rm -rf dist
	$(BIN)/python -m hatchling build -t sdist -t wheel -d dist
	rm -rf docs/_build/.doctrees
	cd docs/_build && ../../$(BIN)/python -m zipfile -c ../../dist/posttrain-$(VERSION)-docs.zip .

families: .venv/.ok ## every family of models through sampler and trainer, into docs/models.md (ten minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.families

bench: .venv/.ok ## speed and memory beside TRL, which gets an environment of its own
	$(BIN)/python benchmarks/trl/vs_trl.py

trl-parity: .venv/.ok ## have TRL write the numbers that our losses and gradients are held to, into tests/data (a minute)
	$(BIN)/python benchmarks/trl/trl_parity.py && $(BIN)/python benchmarks/trl/trainer_names.py --check

trl-scripts: .venv/.ok ## have TRL run benchmarks/trl/scripts, which the suite runs with one line changed
	$(BIN)/python benchmarks/trl/trl_scripts.py

trl-tests: .venv/.ok ## TRL's own tests through posttrain.trl, into docs/guides/trl_tests.md; TRL=FOLDER for a checkout of it
	$(BIN)/python benchmarks/trl/trl_tests.py --write $(if $(TRL),--trl $(TRL))

mutants: .venv/.ok ## change one operator or number at a time: the tests must notice each (hours; goes on where it stopped)
	$(BIN)/python tests/mutants.py
	$(BIN)/python tests/chosen_mutants.py

constraints: .venv/.ok ## resolve every dependency anew into constraints.txt
	$(PIP) install -q uv
	echo 'torch==2.13.0' | $(BIN)/uv pip compile -q --universal --python-version 3.11 --extra dev --extra track --upgrade \
	    --constraints - --custom-compile-command 'make constraints' --no-annotate --output-file constraints.txt pyproject.toml

clean: ## remove what make made; runs/ stays
	rm -rf .venv .venv-trl .venv-trl-ppo .venv-imitation .venv-vllm .gymnasium-0.29 .mutants dist docs/_build docs/api docs/jupyter_execute docs/reference .pytest_cache .mypy_cache .ruff_cache .hypothesis

# .ok is written last and removed first, so that a half-made environment is made again and never used.
.venv/.ok: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    "posttrain needs Python 3.11 or newer, this is %d.%d: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	@test -e $@ || $(PYTHON) -m venv --clear .venv
	@rm -f $@
	@echo "Installing into .venv (torch for $(TORCH)): a few minutes, most of it downloads"
ifeq ($(TORCH),cpu)
	@$(PIP) install -q --no-deps -c constraints.txt --index-url $(TORCH_CPU_INDEX) --retries 0 --timeout 15 torch \
	    2>/dev/null || echo "PyTorch's CPU index cannot be reached: taking torch from the usual package index"
endif
	@$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@

# It shadows the newer one that .venv has; everything else is shared.
.gymnasium-0.29/.ok: .venv/.ok
	$(PIP) install -q --no-deps --upgrade --target .gymnasium-0.29 gymnasium==0.29.1
	@touch $@
