# The commands of this project, on a machine with python3, make and a C library.
#
#   make train [ARGS='--env catch']    trains; see `hephaestus train --help`
#   make test [PYTEST_ARGS='-k dream'] runs the tests
#   make lint                          checks style, formatting, terms and types
#   make clean                         removes what make put here; runs stay
#
# Each first fetches what it lacks: uv into .tools/, Python 3.10 where the machine has none, and the
# locked packages into .venv/. EXTRAS='cuda envs' adds those of pyproject.toml to a training run.

PYTHON ?= python3
VENV := .venv
UV := .tools/uv/bin/uv
ROOMS := agents learner actors replay launch

export UV_PROJECT_ENVIRONMENT := $(VENV)
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif

.PHONY: help train test lint clean
.DELETE_ON_ERROR:

help:
	@while IFS= read -r line; do case "$$line" in '#'*) echo "$$line";; *) break;; esac; done < Makefile

# Without ARGS: catch, long enough to be solved.
ARGS ?= --steps 8000

train: $(EXTRAS:%=$(VENV)/.synced-%) $(VENV)/.synced-base
	$(VENV)/bin/hephaestus train $(ARGS)

# One more than there are cores, because many tests wait for processes; at most 4.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 3 ? cores + 1 : 4)))

test: $(VENV)/.synced-dev
	$(VENV)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: $(VENV)/.synced-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/python tests/glossary.py
	@mkdir -p .tools/typing && ln -sfn ../.. .tools/typing/hephaestus
	MYPYPATH=.tools/typing $(VENV)/bin/mypy $(addprefix -p hephaestus.,$(ROOMS))

clean:
	rm -rf $(VENV) .tools build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(ROOMS) tests -name __pycache__ -prune -exec rm -rf {} +

# Inexact, so that one extra does not remove another.
$(VENV)/.synced-%: pyproject.toml uv.lock | $(UV)
	$(UV) sync --frozen --inexact $(if $(filter-out base,$*),--extra $*)
	@: > $@

$(UV):
	$(PYTHON) launch/bootstrap.py .tools/uv
