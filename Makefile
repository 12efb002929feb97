# Two commands for a newcomer: `make demo` and `make test`. Each sets up .venv first (once).
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check fix clean
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

KERNELS := actors/worker/model/kernels.c

.venv/ready: setup.cfg setup.py constraints.txt $(KERNELS)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing kvferry into .venv; torch makes it take some minutes the first time"
	$(PIP) -e .
	touch $@

.venv/ready-for-tests: .venv/ready
	@echo "installing what the tests and checks need"
	$(PIP) -e '.[test,check]'
	touch $@

demo: .venv/ready  ## set up, then show a hand-off from TP2 to TP1 on the shipped demo model
	$(BIN)/kvferry demo

test: .venv/ready-for-tests  ## set up, then run the tests, two at a time (for some of them: .venv/bin/python -m pytest tests/...)
	$(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder

check: .venv/ready-for-tests  ## style, types and import rules; edits nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: .venv/ready-for-tests  ## let ruff edit what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build actors/worker/model/_kernels*.so *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
