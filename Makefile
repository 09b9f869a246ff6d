# `make demo` and `make test` do all the set-up first; a second run reinstalls nothing. `make test-oldest` runs every test
# with the oldest versions that pyproject.toml promises, in an environment of its own. `make contract` runs the costly
# tests of attached models and further variants of every family too, and writes docs/contract.md; `make fuzz` gives
# 200,000 mutated files to every reader; `make faults` kills every job and fills its disk, 200 times and more, and
# compares what it comes to, and cuts off, slows down and fills one of two hosts; `make docs` writes what docs/ repeats
# of the code, and the pictures of README.md.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
OLDEST := .venv-oldest

.PHONY: venv demo test test-oldest contract fuzz faults docs check format clean
.DEFAULT_GOAL := test

venv: $(STAMP)

# $(call install,FOLDER,CONSTRAINTS): an environment with every extra
define install
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "tread needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
$(PYTHON) -m venv $(1)
$(1)/bin/pip install --quiet --disable-pip-version-check -c $(2) -e '.[diffusers,quant,lycoris,optim,data,track,demo,dev]'
@touch $@
endef

$(STAMP): pyproject.toml constraints.txt
	$(call install,.venv,constraints.txt)

$(OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(call install,$(OLDEST),constraints-oldest.txt)

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadfile

contract: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m '' tests/attach --contract-report docs/contract.md
	$(BIN)/python -m pytest -n 2 --dist worksteal -m contract tests --ignore=tests/attach

fuzz: $(STAMP)
	$(BIN)/python -m fuzz --mutations 200000

faults: $(STAMP)
	$(BIN)/python -m faults --kills 200
	$(BIN)/python -m pytest -m '' tests/hosts

docs: $(STAMP)
	$(BIN)/python -m pages.docs
	$(BIN)/python -m benchmarks.quality report
	$(BIN)/python -m benchmarks.tuning report
	$(BIN)/python -m benchmarks.front_page docs/front

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv $(OLDEST) runs dist build .pytest_cache .ruff_cache
