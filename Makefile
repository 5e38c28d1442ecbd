# `make demo` and `make test` create their own environment in .venv; nothing but Python, make and git is needed.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# TORCH_INDEX=<URL of PyTorch's CPU wheels> spares the CUDA build where pip would take one.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
ARGS ?=
# Compiled modules are kept, whatever the shell says: tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-slow lint clean

demo: $(VENV)/demo.stamp $(if $(findstring mini_swe_agent,$(ARGS)),$(VENV)/mini.stamp)
	$(BIN)/polar demo $(ARGS)

test: $(VENV)/dev.stamp $(VENV)/miles.stamp
	$(BIN)/python -m pytest -m "not slow" -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(VENV)/dev.stamp
	$(BIN)/python -m pytest tests/test_linters.py

clean:
	rm -rf $(VENV) build src/*.egg-info

$(VENV)/python.stamp:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/torch.stamp: $(VENV)/python.stamp
	$(BIN)/pip install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	$(BIN)/pip install -q -e '.[demo]'
	touch $@

$(VENV)/mini.stamp: $(VENV)/demo.stamp
	$(BIN)/pip install -q -e '.[demo,mini]'
	touch $@

# A trainer of Slime's family, for tests; in a folder of its own, since it brings modules of other packages' names.
$(VENV)/miles.stamp: $(VENV)/python.stamp
	$(BIN)/pip install -q --no-deps --target $(VENV)/miles miles-rl==0.0.2
	touch $@

$(VENV)/dev.stamp: $(VENV)/torch.stamp pyproject.toml
	$(BIN)/pip install -q -e '.[demo,dev]'
	touch $@
