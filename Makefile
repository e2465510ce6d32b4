# `make demo` and `make test` do all their own setup: a virtual environment with pinned versions.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help demo fleet test docs chaos explore lint types clean

help:
	@echo "make demo     install, then run PACE against FedAvg, FedAsync and standalone: table, plots, HTML"
	@echo "make fleet    run a server and eight clients on this machine, with TLS, beside the simulator"
	@echo "make test     install, then run linter, type checker and tests"
	@echo "make docs     build the documentation as a site; a warning is an error"
	@echo "make chaos    run ten peers on this machine, kill and restart them for a minute, check their logs;"
	@echo "              then kill a server and its clients a thousand times (some 20 minutes)"
	@echo "make explore  explore all histories of two and three peers up to a large bound (some minutes),"
	@echo "              and a million histories of a fleet on a bad network (less than an hour)"
	@echo "make clean    remove the virtual environment and the demo's results"

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

demo: $(READY)
	rm -rf runs/demo
	$(BIN)/polytempo compare pace fedavg fedasync standalone --config configs/demo.toml --out runs/demo
	@echo "Open runs/demo/report.html, or look at runs/demo/*.png"

fleet: $(READY)
	rm -rf runs/fleet
	$(BIN)/polytempo fleet --local 8 --strategy pace --data digits --slow 0.3:5 --simulate --out runs/fleet
	@echo "Open runs/fleet/server/report.html, or look at runs/fleet/server/*.png"

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks examples docs/mkdocs_hooks.py
	$(BIN)/ruff format --check src tests benchmarks examples docs/mkdocs_hooks.py

types: $(READY)
	$(BIN)/mypy

test: lint types
	$(BIN)/pytest -n 2

docs: $(READY)
	$(BIN)/mkdocs build --strict
	@echo "Open site/index.html"

chaos: $(READY)
	$(BIN)/python tests/network/chaos.py
	$(BIN)/python tests/network/fleet/fleet_chaos.py

explore: $(READY)
	$(BIN)/python tests/nodes/explorer.py
	$(BIN)/python tests/nodes/bad_network.py

clean:
	rm -rf $(VENV) runs/demo runs/fleet site
