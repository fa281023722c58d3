# `make train` and `make test` work from nothing: they make .venv, install, and go. A second call skips what is there.

PYTHON ?= python3
VENV ?= .venv$(if $(NEWEST),-newest)
BIN := $(VENV)/bin

# The version of torch that CI tests. `make TORCH=torch==2.12.0 VENV=.venv-2.12 train` takes another.
TORCH ?= torch$(if $(NEWEST),,==2.13.0)
GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
PROCESSES ?= $(shell [ $(GPUS) = 1 ] && echo 1 || echo 2)

# `make GPUS=0 train` trains on the CPU of a machine with a GPU.
ifeq ($(origin GPUS)$(GPUS),command line0)
export CUDA_VISIBLE_DEVICES :=
endif

# A file of versions to install: by default the lock of the Python at hand. `make NEWEST=1 test` takes the newest versions,
# and `make CONSTRAINTS=.ci/lock/lowest.txt VENV=.venv-lowest TORCH=torch==2.10.0 test` the lowest that pyproject.toml allows.
VERSION := $(shell $(or $(wildcard $(BIN)/python),$(PYTHON)) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
CONSTRAINTS ?= $(if $(NEWEST),,$(wildcard .ci/lock/$(VERSION).txt))
INSTALL := $(BIN)/python -m pip install --quiet $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS)) $(if $(NEWEST),--upgrade --upgrade-strategy eager)

.PHONY: help train compare headlines test coverage mutants conformance gpu lint bench docs corpus lock release clean

help:
	@echo "make train   set up, prepare the corpus, pretrain the quickstart model, say where the results are"
	@echo "make compare set up, train a dense GPT and Mixture-of-Experts ones of equal active FLOPs, compare their losses"
	@echo "make headlines  set up, train models with 32 to 96 experts beside their dense twins, then studies and benchmarks: about six hours"
	@echo "make corpus  set up, prepare the corpus alone; then \`$(BIN)/fmoe train t5\` or \`bert\`"
	@echo "make test    set up, run the tests"
	@echo "make conformance   the long sweep: every pair of gate, experts, split, exchange, wrapper, ... against one process"
	@echo "make coverage   set up, run the tests and report the lines and branches of the packages that they miss"
	@echo "make mutants set up, run the tests of some modules against mutants of their code, report those that no test sees"
	@echo "make gpu     set up, run what needs a GPU: the CUDA kernels against float64, graphs, streams, the sanitizer"
	@echo "make lint    set up, check style, spelling and types"
	@echo "make bench   set up, measure a training step against megatron-core's own MoE layer"
	@echo "make docs    set up, build the documentation as a site: build/site/index.html"
	@echo "make lock    set up, write the newest versions of all packages to .ci/lock, one file per Python"
	@echo "make release set up, build and test the wheel and the sdist of this version, tag the commit"
	@echo "make clean   remove .venv and the prepared corpora; runs/ stays"

train: $(VENV)/.train corpus
	$(BIN)/fmoe train quickstart --resume auto --parallel.expert $(PROCESSES) $(ARGS)

compare: $(VENV)/.train corpus
	$(BIN)/python -m bench convergence $(ARGS)

headlines: $(VENV)/.train corpus
	FMOE=$(BIN)/fmoe bash data/bytes/prepare.sh
	$(BIN)/python -m bench headlines --out runs/headlines/rows.json $(ARGS)

corpus: $(VENV)/.train
	FMOE=$(BIN)/fmoe bash data/pylib/prepare.sh

# `make ISA=avx2 test` limits torch, oneDNN and the native backend to what a lesser processor has.
ISA ?=
ISA_avx2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 FMOE_NATIVE_ISA=avx2
ISA_avx512 := ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE FMOE_NATIVE_ISA=avx512
PYTEST = $(if $(ISA),$(or $(ISA_$(ISA)),$(error ISA=$(ISA) is unknown: use avx2 or avx512)) )$(BIN)/python -m pytest

# Hundreds of processes import the packages, so their bytecode is kept, except for mutants.
unexport PYTHONDONTWRITEBYTECODE
mutants: export PYTHONDONTWRITEBYTECODE := 1

# JOBS processes run test files in parallel; some start ten more, with torch in memory (2.5 GB). `make JOBS=1 test` runs
# one file after the other. Files that wait for processes run beside files that compute: by default, one more than cores.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 1); echo $$((n < 4 ? n + 1 : 4)))
SIDE_BY_SIDE = $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadfile --no-loadscope-reorder)

test: $(VENV)/.test
	$(PYTEST) $(SIDE_BY_SIDE) $(ARGS)

# Includes the processes that tests start. With files or folders in ARGS, the report still covers the whole packages.
coverage: $(VENV)/.test
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --cov --cov-report=term --cov-report=html:build/coverage $(ARGS)

# cosmic-ray writes each mutant over its file and restores the file afterwards. Fails above 10 % of survivors.
SUBJECTS ?= $(basename $(notdir $(wildcard .ci/mutants/*.toml)))

mutants: export PATH := $(abspath $(BIN)):$(PATH)
mutants: $(VENV)/.test
	@git diff --quiet -- fmoe pretrain || { echo "mutants are written over the files: commit your changes first"; exit 2; }
	$(INSTALL) --editable '.[mutants]'
	mkdir -p build/mutants
	status=0; for subject in $(SUBJECTS); do \
		config=.ci/mutants/$$subject.toml; session=build/mutants/$$subject.sqlite; \
		cosmic-ray init --force $$config $$session && python .ci/mutants/sample.py $$config $$session && \
		cosmic-ray baseline $$config && cosmic-ray exec $$config $$session && \
		cr-report --surviving-only --show-diff $$session && cr-rate --fail-over 10 $$session || status=1; \
	done; exit $$status

# Each part runs even if one before it fails. The last one is the suite with the newest Python and its packages. The cases
# of the first part are few long files, so JOBS share their tests.
conformance: $(VENV)/.test
	status=0; \
	$(PYTEST) $(subst loadfile,load,$(SIDE_BY_SIDE)) tests/conformance -m 'slow or not slow' $(ARGS) || status=$$?; \
	$(PYTEST) $(SIDE_BY_SIDE) tests --ignore tests/conformance -m slow $(ARGS) || status=$$?; \
	[ $(VERSION) = 3.13 ] || $(MAKE) PYTHON="$$(.ci/python 3.13)" VENV=.venv-3.13 test || status=$$?; \
	exit $$status

gpu: $(VENV)/.test
	$(BIN)/python -m pytest tests/gpu $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell .
	$(BIN)/python -m mypy
	$(BIN)/shellcheck pretrain/*.sh pretrain/slurm.sbatch bench/*.sh .ci/run .ci/python .ci/release

bench: $(VENV)/.test
	$(BIN)/python -m bench step $(ARGS)

docs: $(VENV)/.test
	$(BIN)/python -m sphinx -c docs -d build/doctrees -E -W --keep-going --quiet . build/site $(ARGS)
	@echo "build/site/index.html is written"

lock: $(VENV)/.test
	for version in 3.11 3.12 3.13; do \
		echo '$(TORCH)' | $(BIN)/uv pip compile --quiet --upgrade --no-header --no-annotate --python-version $$version \
			--python-platform linux --extra dev --extra cuda pyproject.toml - >$(VENV)/lock || exit; \
		{ echo "# Versions for Python $$version, without torch and the packages whose versions it chooses: \`make lock\`."; \
			grep -vP '^(torch|triton|cuda-toolkit|nvidia-(?!cuda-nvrtc).*)==' $(VENV)/lock; } >.ci/lock/$$version.txt; \
	done

release: $(VENV)/.test
	.ci/release $(BIN)

clean:
	rm -rf $(VENV) data/*/out

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fmoe needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version 2>&1): make PYTHON=python3.12"; exit 2; }
	@[ -n "$(CONSTRAINTS)$(NEWEST)" ] || echo "no lock for Python $(VERSION): taking the newest versions of all packages"
	$(PYTHON) -m venv $(VENV)

# What to install; written when it changes, the newest versions every day, so that packages are installed again.
WANTED = $(TORCH) $(or $(CONSTRAINTS),the newest of $(shell date +%F))
$(VENV)/.versions: $(BIN)/python always
	@echo '$(WANTED)' | cmp --silent - $@ || echo '$(WANTED)' >$@

.PHONY: always

# The extra with the compiler of the CUDA kernels, for the CUDA of the installed torch; if it has none, for CUDA $(1).
cuda_extra = $$($(BIN)/python -c 'import torch; \
	print({"12": ",cuda12", "13": ",cuda"}.get((torch.version.cuda or "$(1)").split(".")[0], ""))')

# torch first and by itself, so that nothing else chooses its build.
$(VENV)/.train: $(VENV)/.versions pyproject.toml $(CONSTRAINTS)
	$(INSTALL) '$(TORCH)'
	$(INSTALL) --editable ".[pretrain$(call cuda_extra,none)]"
	@$(BIN)/python -c 'import sys; from pretrain.start.process import unusable_gpu; sys.exit(unusable_gpu())'
	@touch $@

$(VENV)/.test: $(VENV)/.versions pyproject.toml $(CONSTRAINTS)
	$(INSTALL) '$(TORCH)'
	$(INSTALL) --editable ".[dev$(call cuda_extra,13)]"
	@touch $@ $(VENV)/.train
