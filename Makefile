# One virtual environment in the checkout, made once and reused until setup.py changes.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PY := .venv/bin/python

.PHONY: demo test lint bench install clean

demo: install
	rm -rf runs/mnist
	$(PY) examples/train_mnist.py

test: install
	$(PY) -m pytest -n logical --maxprocesses=4 --dist loadfile

lint: install
	$(PY) -m pip install -q -e '.[lint]'
	$(PY) -m ruff check . && $(PY) -m ruff format --check .

bench: install
	$(PY) -m benchmarks.planned
	$(PY) -m benchmarks.compare
	$(PY) -m benchmarks.checkpoints

install: .venv/installed

.venv/installed: setup.py
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install -q -e '.[examples,plan,pod,test]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
