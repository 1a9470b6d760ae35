# The commands of this project, on a machine with python3, make and a C library.
#
#   make train [ARGS='--env catch']    trains; see `hephaestus train --help`
#   make test                          runs the tests, then those of the core
#   make test PYTEST_ARGS='-k dream'   runs some of the tests
#   make test-core                     runs tests of the core, on Python 3.12 and current JAX
#   make docs [ARGS=serve]             builds the site of docs/ into build/site, or serves it
#   make lint                          checks style, formatting, terms and types
#   make clean                         removes what make put here; runs stay
#
# Each first fetches what it lacks: uv into .tools/, Python 3.10 where the machine has none, and the
# locked packages into .venv/, those of the core into .venv-core/. EXTRAS='cuda envs' adds those of
# pyproject.toml to a training run.

PYTHON ?= python3
VENV := .venv
UV := .tools/uv/bin/uv
ROOMS := agents learner actors replay launch

export UV_PROJECT_ENVIRONMENT := $(VENV)
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif

.PHONY: help train test test-core docs lint clean
.DELETE_ON_ERROR:

help:
	@while IFS= read -r line; do case "$$line" in '#'*) echo "$$line";; *) break;; esac; done < Makefile

# Without ARGS: catch, long enough to be solved.
ARGS ?= --steps 8000

# JAX's packages for the accelerator of this machine; ACCELERATOR= leaves them out.
DEVICES ?= /dev
ACCELERATOR ?= $(if $(wildcard $(DEVICES)/accel[0-9]*),tpu,$(if $(wildcard $(DEVICES)/nvidiactl),cuda))

train: $(patsubst %,$(VENV)/.synced-%,$(EXTRAS) $(ACCELERATOR)) $(VENV)/.synced-base
	$(VENV)/bin/hephaestus train $(ARGS)

# One more than there are cores, because many tests wait for processes; at most 4.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 3 ? cores + 1 : 4)))

test: $(VENV)/.synced-dev
	$(VENV)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)
ifndef PYTEST_ARGS
	@if $(WITH_CORE) $(UV) python find -q $(CORE_PYTHON) >/dev/null 2>&1 \
	    || $(UV) python install -q $(CORE_PYTHON); \
	  then $(MAKE) test-core; \
	  else echo "left out test-core: there is no Python $(CORE_PYTHON), and uv cannot fetch it"; fi
endif

# One process, without Reverb, Launchpad and TensorFlow, which have no wheels for this Python.
CORE := .venv-core
CORE_PYTHON ?= 3.12
# Else pyenv, where there is one, hides all versions but that of .python-version.
WITH_CORE := PYENV_VERSION=$(CORE_PYTHON)
CORE_TESTS := $(addprefix tests/,agents/test_agent.py actors/environments/test_catch.py \
  actors/environments/test_wrappers.py \
  launch/run/test_without_distributed.py learner/test_dreamer_options.py learner/test_fused_replay.py replay/test_buffer.py)

test-core: $(CORE)/.synced
	$(CORE)/bin/python -m pytest -q -n $(WORKERS) --dist loadfile $(CORE_TESTS)

docs: ARGS = build --strict
docs: $(VENV)/.synced-docs
	cd docs/site && NO_MKDOCS_2_WARNING=true $(CURDIR)/$(VENV)/bin/mkdocs $(ARGS)

lint: $(VENV)/.synced-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/python tests/glossary.py
	@mkdir -p .tools/typing && ln -sfn ../.. .tools/typing/hephaestus
	MYPYPATH=.tools/typing $(VENV)/bin/mypy $(addprefix -p hephaestus.,$(ROOMS))

clean:
	rm -rf $(VENV) $(CORE) .tools build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(ROOMS) tests -name __pycache__ -prune -exec rm -rf {} +

# Inexact, so that one extra does not remove another.
$(VENV)/.synced-%: pyproject.toml uv.lock | $(UV)
	$(UV) sync --frozen --inexact --extra distributed $(if $(filter-out base,$*),--extra $*)
	@: > $@

$(CORE)/.synced: pyproject.toml uv.lock | $(UV)
	$(WITH_CORE) UV_PROJECT_ENVIRONMENT=$(CORE) $(UV) sync --frozen --python $(CORE_PYTHON) --group core
	@: > $@

$(UV):
	$(PYTHON) launch/bootstrap.py .tools/uv
