# The commands of this project, on a machine with python3, make and a C library.
#
#   make train [ARGS='--env catch']    trains; see `hephaestus train --help`
#   make test                          runs the tests, then `make test-core`
#   make test PYTEST_ARGS='-k dream'   runs some of the tests
#   make test-core                     runs tests of the core, on Python 3.12 and current JAX
#   make test-fresh                    the same with the newest packages, not the locked ones, and all extras
#   make test-faults                   kills real runs, which must resume; takes some minutes
#   make docs [ARGS=serve]             builds the site of docs/ into build/site, or serves it
#   make lint                          checks style, formatting and types
#   make clean                         removes what make put here; runs stay
#
# Each first fetches what it lacks: uv into .tools/, Python 3.10 where the machine has none, and the
# locked packages into .venv/, or .venv-core/ for test-core. EXTRAS='cuda envs' adds extras of
# pyproject.toml to a training run.

PYTHON ?= python3
VENV := .venv
UV := .tools/uv/bin/uv
ROOMS := agents learner actors replay launch

export UV_PROJECT_ENVIRONMENT := $(VENV)
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif

.PHONY: help train test test-core test-fresh test-faults docs lint clean
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

# One more than there are cores, because many tests wait for processes; each takes up to 3 GB of memory.
WORKERS ?= $(shell cores=$$(nproc); \
  kilobytes=$$(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo); \
  most=$$(($${kilobytes:-12000000} / 3000000)); \
  echo $$((cores < most ? cores + 1 : most > 1 ? most : 1)))
PYTEST := -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.synced-dev
	$(VENV)/bin/python $(PYTEST) $(PYTEST_ARGS)
ifndef PYTEST_ARGS
	@if $(WITH_CORE) $(UV) python find -q $(CORE_PYTHON) >/dev/null 2>&1 \
	    || $(UV) python install -q $(CORE_PYTHON); \
	  then $(MAKE) test-core; \
	  else echo "left out test-core: there is no Python $(CORE_PYTHON), and uv cannot fetch it"; fi
endif

# One process, without Reverb, Launchpad and TensorFlow, which have no wheels for this Python.
CORE := .venv-core
CORE_PYTHON ?= 3.12
# Otherwise pyenv, if it is installed, shows only the version of .python-version.
WITH_CORE := PYENV_VERSION=$(CORE_PYTHON)
# These test the differences there: no Reverb, replay in device memory, another JAX, which compiles a
# fused run of each agent, and another gymnax.
CORE_TESTS := $(addprefix tests/,launch/run/test_without_distributed.py \
  learner/test_fused.py::test_stopped_run_resumes_bitwise replay/test_buffer.py \
  $(foreach test,truncation_keeps_discount_one step_may_be_traced_again, \
    actors/environments/test_contract.py::test_$(test)[gymnax/CartPole-v1]))

test-core: $(CORE)/.synced
	$(CORE)/bin/python $(PYTEST) $(CORE_TESTS)

# What `pip install` gives today on a new machine; for a scheduled job, since packages change without us.
FRESH := .venv-fresh
FRESH_EXTRAS ?= dashboard,envs,report,wandb
FRESH_TESTS := $(CORE_TESTS) $(addprefix tests/,actors/environments/test_make.py \
  launch/report/test_report.py launch/report/test_dashboard.py launch/inspect/test_environments.py)

test-fresh: $(UV)
	$(WITH_CORE) $(UV) venv -q --clear --python $(CORE_PYTHON) $(FRESH)
	$(UV) pip install -q --python $(FRESH) --group core -e '.[$(FRESH_EXTRAS)]'
	$(FRESH)/bin/python $(PYTEST) $(FRESH_TESTS)

test-faults: $(VENV)/.synced-dev
	$(VENV)/bin/python $(PYTEST) -m faults

docs: ARGS = build --strict
docs: $(VENV)/.synced-docs
	cd docs/site && NO_MKDOCS_2_WARNING=true $(CURDIR)/$(VENV)/bin/mkdocs $(ARGS)

lint: $(VENV)/.synced-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	@mkdir -p .tools/typing && ln -sfn ../.. .tools/typing/hephaestus
	MYPYPATH=.tools/typing $(VENV)/bin/mypy $(addprefix -p hephaestus.,$(ROOMS))

clean:
	rm -rf $(VENV) $(CORE) $(FRESH) .tools build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
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
