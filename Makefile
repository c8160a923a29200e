# `make demo` and `make test` set up all they need in .venv
.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-tutorials tutorials lint bench docs clean

VENV := .venv
BIN := $(VENV)/bin
SUITABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

# python3 if it is new enough, else the newest that is; override with `make PYTHON=... test`
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c '$(SUITABLE)' 2>/dev/null && echo "$$p" && exit; done; echo python3)

help:
	@echo "make demo      sample two real posteriors, write demo.png"
	@echo "make test      lint and tests"
	@echo "make test-all  lint and tests, the slow statistical ones too"
	@echo "make test-tutorials  run the tutorials, as a check"
	@echo "make tutorials  run the tutorials and store them with their outputs"
	@echo "make lint      ruff and mypy"
	@echo "make bench     run the benchmarks, bounded to minutes"
	@echo "make docs      build the documentation, docs/build/index.html"
	@echo "make clean     remove all that make has made, .venv too"

demo: $(VENV)/.plots
	$(BIN)/python -m ppl_ext demo

test: lint
	$(BIN)/python -m pytest

test-all: lint
	$(BIN)/python -m pytest -m ''

# one after the other: they say how long things take
test-tutorials: $(VENV)/.dev $(VENV)/.tutorials
	$(BIN)/python -m pytest tests/test_tutorials.py -m tutorials -n 0 $(TUTORIALS)

tutorials: export WRITE_TUTORIALS = 1
tutorials: test-tutorials

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	@found=; for f in benchmarks/*.py; do \
		[ -e "$$f" ] || continue; found=yes; echo "$$f"; \
		OPENBLAS_NUM_THREADS=1 $(BIN)/python "$$f" --quick || exit 1; \
	done; [ -n "$$found" ] || echo "There is no benchmark yet."

docs: $(VENV)/.docs
	$(BIN)/sphinx-build -q -E -W --keep-going docs docs/build
	@echo "docs/build/index.html"

clean:
	rm -rf $(VENV) .venv-arviz1 build dist docs/build demo.png *.egg-info \
		.mypy_cache .pytest_cache .ruff_cache
	find ppl_ext tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@"$(PYTHON)" -c '$(SUITABLE)' 2>/dev/null || { \
		echo "ppl_ext needs Python 3.11 or newer with venv; '$(PYTHON)' is not." >&2; \
		echo "Install one (Debian, Ubuntu: apt-get install python3-venv)," >&2; \
		echo "or name it: make PYTHON=/path/to/python3 $(MAKECMDGOALS)" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; print("Python %d.%d.%d in $(VENV)" % sys.version_info[:3])'
	@"$(PYTHON)" -m venv $(VENV)
	@touch $@

# one stamp for each set of extras
$(VENV)/.%: pyproject.toml $(VENV)/.created
	@echo "Installing ppl_ext[$*] into $(VENV) (a minute or two the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$*]"
	@touch $@
