# `make demo` and `make test` do everything on a fresh machine: they make their own virtual
# environment (.venv) from the pinned versions in constraints.txt.
PYTHON ?= python3
VENV ?= .venv
DYNAMO_VENV ?= .venv-dynamo
BIN := $(VENV)/bin
BUNDLE := build/demo-bundle
SMOLLM2 := build/smollm2-135m
REAL := build/real-bundle
REAL_SETS := --prompts maths=real_pair/prompts.jsonl --prompts code=real_pair/code.jsonl --prompts chat=real_pair/chat.jsonl
BENCH := $(BIN)/python -m dflash_perf bench
KINDS := eagle3 dflash dflash2 dspark
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo demo-all real picture test test-exhaustive test-dynamo lint format benchmark clean

demo: $(VENV)/.installed
	$(BIN)/dflash-trt doctor
	$(BIN)/dflash-trt build --target demo --max-batch 16 --overwrite -o $(BUNDLE)
	head -n 1 demo_pair/prompts.jsonl > build/first-prompt.jsonl
	$(BIN)/dflash-trt generate $(BUNDLE) --prompt-file build/first-prompt.jsonl --view
	$(BIN)/dflash-trt verify $(BUNDLE) --limit-prompts 8 --repeats 3
	$(BENCH) served-demo $(BUNDLE) --output-dir build/served --runs 1 --concurrency 1,4 --osl 64 --blocks 8
	$(BIN)/dflash-trt plan --target gpt-oss-120b --gpu b300x8 --interactivity 500
	$(BIN)/dflash-trt build --target gpt-oss-120b --executor trtllm --profile b300x8 --overwrite -o build/gpt-oss-120b-b300x8
	@echo 'open build/served/report.html; make demo-all shows quantised pairs, tuning and four kinds of drafts'

# What takes longer: whole proofs, quantised and gpt-oss pairs, tuning, drafts of four kinds under load.
demo-all: demo
	$(BIN)/dflash-trt inspect $(BUNDLE) --verify
	$(BIN)/dflash-trt generate $(BUNDLE) --prompt-file demo_pair/prompts.jsonl --json --max-tokens 128 > build/demo-outputs.json
	$(BIN)/dflash-trt verify $(BUNDLE) --repeats 7
	$(BIN)/dflash-trt build --target demo-nvfp4 --overwrite -o build/demo-nvfp4-bundle
	$(BIN)/dflash-trt verify build/demo-nvfp4-bundle --against $(BUNDLE) --max-tokens 64
	$(BIN)/dflash-trt build --target demo-gpt-oss --overwrite -o build/demo-gpt-oss-bundle
	$(BIN)/dflash-trt verify build/demo-gpt-oss-bundle --max-tokens 64
	$(BIN)/dflash-trt tune $(BUNDLE)
	for kind in $(KINDS); do \
	  $(BIN)/dflash-trt build --target demo-$$kind --max-batch 16 --overwrite -o build/demo-$$kind-bundle && \
	  $(BIN)/dflash-trt tune build/demo-$$kind-bundle --limit-prompts 12 || exit; done
	$(BENCH) served-demo $(BUNDLE) --output-dir build/served --runs 2 --blocks 8 \
	  --beside 'EAGLE-3=build/demo-eagle3-bundle' --beside 'DSpark=build/demo-dspark-bundle' \
	  --beside 'DFlash 2=build/demo-dflash2-bundle' \
	  --beside 'DFlash, same data=build/demo-dflash-bundle'
	@echo 'open build/served/report.html'

# A real model, and the draft that was trained for it: a chat model of 135 million parameters from
# the package index (98 MB), on the CPU; in eight bits, as its configuration asks, and in float32.
real: $(SMOLLM2)/config.json
	$(BIN)/dflash-trt build --target smollm2-135m --target-checkpoint $(SMOLLM2) --overwrite -o $(REAL)
	$(BIN)/dflash-trt build --target smollm2-135m --target-checkpoint $(SMOLLM2) --precision fp32 --overwrite -o $(REAL)-fp32
	$(BIN)/dflash-trt generate $(REAL) --view --prompt 'A farmer sells 12 melons at $$3 each and 9 pumpkins at $$5 each. How much does he earn?'
	$(BIN)/dflash-trt verify $(REAL) $(REAL_SETS) --max-tokens 96 --limit-prompts 4
	$(BIN)/dflash-trt verify $(REAL)-fp32 $(REAL_SETS) --max-tokens 96 --limit-prompts 2
	$(BIN)/dflash-trt verify $(REAL) --against $(REAL)-fp32 --max-tokens 96 --limit-prompts 8
	$(BIN)/dflash-trt tune $(REAL) $(REAL_SETS) --limit-prompts 6
	$(BIN)/dflash-trt tune $(REAL)-fp32 $(REAL_SETS) --limit-prompts 3 --block-size 2,3,4,6,8
	$(BENCH) served-demo $(REAL) --output-dir build/real --runs 1 --osl 64 --blocks 4 --concurrency 1,2,4,8 --end-at-eos \
	  --beside 'DFlash 2 in float32, tuned=$(REAL)-fp32'
	@echo 'talk to it: $(BIN)/dflash-trt generate $(REAL) --chat; open build/real/report.html'

# The README's picture: a race of the real pair, tuned, in Chromium.
picture: $(SMOLLM2)/config.json $(VENV)/.installed-test
	test -e $(REAL) || $(BIN)/dflash-trt build --target smollm2-135m --target-checkpoint $(SMOLLM2) -o $(REAL)
	$(BIN)/dflash-trt tune $(REAL) $(REAL_SETS) --limit-prompts 6
	$(BIN)/python -m tests.serving.picture $(REAL) docs/race.png

test: $(VENV)/.installed-test
	$(PYTEST)

# What a daily run proves on one case for each kind, on all cases; a test of each kind of kernel
# without AVX-512; and the pinned packages, where the network answers.
test-exhaustive: $(VENV)/.installed-test
	$(BIN)/python -m tests.without_avx512
	$(PYTEST) -rs -m "exhaustive and not full"
	$(BIN)/python -m tests.audit

# Workers behind NVIDIA Dynamo's frontend, whose packages (650 MB) no other target brings.
test-dynamo: $(VENV)/.installed-test $(DYNAMO_VENV)/.installed
	$(PYTEST) -rs -m "exhaustive or not exhaustive" tests/dynamo

lint: $(VENV)/.installed-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

benchmark: $(VENV)/.installed-test
	$(BIN)/dflash-trt build --target demo --max-batch 32 --overwrite -o $(BUNDLE)
	$(BIN)/dflash-trt tune $(BUNDLE)
	$(BENCH) speed demo=$(BUNDLE) --output perf/results
	$(BENCH) kernel-resources

$(SMOLLM2)/config.json: | $(VENV)/.installed
	rm -rf $(SMOLLM2)
	$(BIN)/python -c 'import sys; sys.excepthook = lambda _, error, __: print(f"error: {error}", file=sys.stderr); from pathlib import Path; from dflash_trt.cli.demo import fetch_real; fetch_real(Path("$(SMOLLM2)"))'

# NVIDIA Dynamo's frontend, router and runtime, and this project beside them: 650 MB.
$(DYNAMO_VENV)/.installed: pyproject.toml deploy/dynamo/requirements.txt
	$(PYTHON) -m venv --clear $(DYNAMO_VENV)
	$(DYNAMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r deploy/dynamo/requirements.txt -e .
	touch $@

clean:
	rm -rf build dist $(VENV) $(DYNAMO_VENV)

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; set PYTHON=…")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[serve,perf,gguf]'
	mkdir -p build
	touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -e '.[test,train,rtx,serve,perf,plugins]'
	mkdir -p build
	touch $@ $(VENV)/.installed
