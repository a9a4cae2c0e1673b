# Needs make and Python 3.11 or newer; everything else goes into .venv with pip.
#   make demo     the whole job on a small synthetic archive, into ./demo
#   make test     all tests but the long ones      make soak    the long ones
#   make gpu-check   what works on the GPUs of this machine and how fast, in eight minutes, into ./gpu-check
#   make lint     ruff and mypy                    make clean   remove what was made here (not .venv, not your runs)
#   make docs     the documents as a site, into ./site

PYTHON ?= python3
PIP_FLAGS ?=
PYTEST_FLAGS ?=
# Extras for the tests beside those of pyproject.toml's test: `make test MORE=,ci`.
MORE ?=
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet $(PIP_FLAGS)

.PHONY: demo test soak gpu-check lint docs clean
.DELETE_ON_ERROR:

demo: .venv/.installed
	$(BIN)/hyfi demo --out demo

# Bytecode is kept, whatever the environment says: the tests start many processes, each of which would compile it all.
test: .venv/.installed-test
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not soak" -n 2 --dist loadfile $(PYTEST_FLAGS)

soak: .venv/.installed-test
	$(BIN)/python -m pytest -m soak $(PYTEST_FLAGS)

gpu-check: .venv/.installed-test
	$(BIN)/python -m workflows.gpu_check --out gpu-check

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.installed-docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path "./.venv/*" -prune -exec rm -rf {} +
	if [ -f demo/.hyfi-demo ]; then rm -rf demo; fi

# A stamp for each set of extras: a second call finds it and costs nothing.
.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11 or missing; say which to use: make PYTHON=python3.12 …" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.installed: pyproject.toml | .venv/bin/python
	@echo "installing into .venv (a minute or two) …"
	@$(INSTALL) -e ".[local,view]"
	@touch $@

# timm without torchvision, whose wheels on PyPI do not fit a PyTorch for CPUs; the tests have a stand-in for it.
INSTALL_TIMM = $(INSTALL) --no-deps "timm>=1.0.15"

.venv/.installed-test: pyproject.toml | .venv/bin/python
	@echo "installing into .venv (a minute or two) …"
	@$(INSTALL) -e ".[local,test,bench$(MORE)]"
	@$(INSTALL_TIMM)
	@touch $@ .venv/.installed

.venv/.installed-dev: pyproject.toml | .venv/bin/python
	@echo "installing into .venv (a minute or two) …"
	@$(INSTALL) -e ".[local,test,bench,dev$(MORE)]"
	@$(INSTALL_TIMM)
	@touch $@ .venv/.installed .venv/.installed-test

.venv/.installed-docs: pyproject.toml | .venv/bin/python
	@echo "installing into .venv (a minute or two) …"
	@$(INSTALL) -e ".[docs]"
	@touch $@
