# Each target makes what it needs, the virtual environment included; all it takes is
# Python 3.11 or newer. `make PYTHON=python3.12` picks another interpreter.
PYTHON = python3
VENV = .venv
PY = $(VENV)/bin/python
INSTALLED = $(VENV)/.installed
HTML = _build/html
PORT = 8000

.PHONY: help book test check execute sync bench links serve clean model
.DEFAULT_GOAL := help

help:  ## say what the targets do
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-9s %s\n", $$1, $$2}' Makefile

book: $(INSTALLED) model  ## build the web pages into _build/html
	@$(VENV)/bin/jupyter-book build --quiet .
	@echo "The book: $(HTML)/index.html"

test: $(INSTALLED) model  ## everything: library, book, and every cell of every notebook
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile tests
	$(PY) -m pytest --nbval chapters

check: $(INSTALLED)  ## the quick part: style, and tests that run nothing long
	$(PY) -m ruff check .
	$(PY) -m pytest -m "not slow" tests

sync: $(INSTALLED)  ## carry edits between chapters/*.md and *.ipynb
	@$(PY) tools/notebooks.py sync $(NAMES)

execute: $(INSTALLED) model  ## run the notebooks that changed (ALL=1: all; NAMES="01 02")
	@$(PY) tools/notebooks.py execute $(if $(ALL),--all) $(NAMES)

bench: $(INSTALLED) model  ## measure the speed of the library on this machine
	$(PY) -m pip install --quiet -r tests/benchmarks/requirements.txt -c constraints.txt
	@missed=0; for file in tests/benchmarks/bench_*.py; do \
	  echo "== $$file"; $(PY) $$file || missed=1; done; exit $$missed

links: $(INSTALLED)  ## ask the network whether the pages that the course cites are there
	$(VENV)/bin/jupyter-book build --builder linkcheck .

serve: book  ## build the book and serve it on this machine
	$(PY) -m http.server $(PORT) --bind 127.0.0.1 --directory $(HTML)

clean:  ## remove everything that make made, the virtual environment included
	rm -rf _build $(VENV) lib/build lib/*.egg-info .pytest_cache .ruff_cache

model: $(INSTALLED)
	@$(PY) -m opsbyte.llm.fetch

$(INSTALLED): requirements.txt constraints.txt lib/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "The course needs Python 3.11 or newer; %s is %d.%d. Name another one: make PYTHON=python3.12" \
	  % (sys.executable, *sys.version_info[:2]))'
	@echo "Setting up $(VENV): a few minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@$(PY) -m pip install --disable-pip-version-check --progress-bar off --quiet \
	  -r requirements.txt -c constraints.txt
	@touch $@
