# Two commands matter: `make quickstart` and `make test`. Both make .venv when it is missing.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread: equal sums on every run, and no waiting at barriers on a machine that others use, too.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
# Each of hundreds of processes would compile all modules anew where an environment forbids to keep what was compiled.
export PYTHONDONTWRITEBYTECODE :=
# Processes that share the files of a long run, the longest first (tests/longest.py); the tests of a file stay together,
# as what they set up does.
WORKERS ?= 2
TOGETHER := -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=20

.PHONY: quickstart test test-more more beside test-waiting test-avx2 processor test-fast test-slow test-gpu test-vllm lint format types reference docs wheel clean

quickstart: $(VENV)/.installed
	$(BIN)/quartet quickstart

COMMON := -m "not slow and not gpu and not vllm"
# What takes long (kills, Ray, meshes, fuzz) is `make test-more`; continuous integration runs both.
MORE := $(shell grep -o '"tests/[^"]*"' tests/longest.py | tr -d '"')
test: $(VENV)/.installed-test lint types processor
	$(PYTEST) $(TOGETHER) $(COMMON) $(addprefix --ignore=,$(sort $(MORE) $(WAITING)))

test-more: $(VENV)/.installed-test
	$(MAKE) --no-print-directory -j2 more beside
more: $(VENV)/.installed-test
	$(PYTEST) $(TOGETHER) $(COMMON) $(filter-out $(WAITING) tests/distributed/%,$(MORE))

# One process beside those two, among others with what waits for Ray, signals and its own processes much of its time.
WAITING := tests/e2e/test_placement_faults.py tests/e2e/test_ray_placements.py tests/e2e/test_ray_model_parallel.py \
	tests/e2e/test_rank_failures.py 	tests/distributed
BESIDE := $(VENV)/beside.log
beside: $(VENV)/.installed-test
	@status=0; for part in test-avx2 test-waiting; do \
		$(MAKE) --no-print-directory WORKERS=0 $$part || status=$$?; \
	done >$(BESIDE) 2>&1; cat $(BESIDE); exit $$status

test-waiting: $(VENV)/.installed-test
	$(PYTEST) $(TOGETHER) $(COMMON) $(WAITING)

# What decides the order of sums, and so the last bits of every figure.
processor: $(VENV)/.installed-test
	@OMP_NUM_THREADS=1 $(BIN)/python -c "from quartet.observe.memory import describe_processor; print('processor:', describe_processor())"

# What promises equal bits, or a distance in them, again with the kernels of a processor that has no AVX-512: where memory
# lies, how many rows a product has, and engine beside trainer. What a test adds in Python alone is not asked twice.
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
BITS := tests/unit/models/test_aligned_memory.py tests/unit/models/test_exact.py tests/unit/models/test_shared_prefixes.py \
	tests/unit/rollout/test_agreement.py tests/unit/rollout/test_lora_rollout.py tests/unit/observe/test_cpu.py \
	"tests/unit/trainers/test_placements.py::test_a_placement_trains_the_same_model" \
	"tests/unit/trainers/test_whole_step.py::test_a_step_equals_the_slow_one[ppo]" tests/golden
BITS_SLOW := $(addprefix tests/unit/trainers/test_placements.py::,test_a_model_from_a_file_trains_the_same \
		test_adapters_and_an_interrupted_run_under_a_budget test_a_run_is_resumed_under_another_placement \
		test_a_resumed_run_does_not_need_what_its_engine_had_in_the_cache test_what_else_a_run_may_have) \
	$(addprefix tests/unit/trainers/test_whole_step.py::test_a_step_equals_the_slow_one,[gspo] [rloo] [remax] [online_dpo]) \
	tests/e2e/test_resume.py::test_an_rl_run_survives_one_kill_after_another \
	"tests/e2e/test_ray_placements.py::test_workers_train_the_same_model[pipelined]"
test-avx2: $(VENV)/.installed-test
	@if grep -qw avx512f /proc/cpuinfo 2>/dev/null; then \
		echo "with AVX2 alone:"; $(AVX2) $(PYTEST) $(TOGETHER) $(COMMON) $(BITS); \
	else \
		echo "test-avx2 is skipped: this processor has nothing above AVX2, so all tests ran without it"; \
	fi

test-fast: $(VENV)/.installed-test
	$(PYTEST) $(TOGETHER) tests/unit $(COMMON)

test-slow: $(VENV)/.installed-test
	$(PYTEST) -m "slow and not gpu and not vllm"
	$(MAKE) --no-print-directory BITS="$(BITS_SLOW)" test-avx2

# Needs one GPU; runs with whatever python has torch, without the virtual environment.
test-gpu:
	$(PYTHON) -m pytest -q tests/gpu -m gpu

# vLLM's CPU build in an environment of its own, which is made once (some minutes, 3 GB).
VLLM := .venv-vllm
test-vllm: $(VENV)/.installed-test
	@if $(BIN)/python benchmarks/peers/environments.py vllm --folder $(VLLM); then \
		$(PYTEST) tests -m vllm; \
	else \
		echo "test-vllm is skipped: its environment $(VLLM) could not be made, see above"; \
	fi

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# docs/reference from the recipes' own classes; a test compares them.
reference: $(VENV)/.installed
	$(BIN)/quartet config --write docs/reference

# docs/ as a site, to be opened from the disk; its search needs a server (python3 -m http.server -d site).
docs: $(VENV)/.installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo site/index.html

# What `pip install` takes elsewhere. build/ may hold modules that are gone.
wheel: $(VENV)/.installed
	rm -rf build
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

types: $(VENV)/.installed-test
	$(BIN)/mypy

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Quartet needs Python 3.11 or newer; set PYTHON=python3.12, say")'
	$(PYTHON) -m venv $(VENV) || (rm -rf $(VENV); echo "python3 -m venv failed: on Debian and Ubuntu, apt install python3-venv"; exit 1)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check "torch>=2.11,<2.14"
	$(BIN)/pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check "torch>=2.11,<2.14"
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[test]"
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build site src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
