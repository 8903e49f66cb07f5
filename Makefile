# One virtual environment in the checkout, made once and reused until setup.py changes.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PY := .venv/bin/python
# In the order of test/conftest.py, long files first, and in as many processes as it says.
RANKS := --dist loadfile --no-loadscope-reorder -n auto

# A hundred processes of the tests would compile what is here anew, a second each and more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all check lint size docs bench install clean

# Where everything is installed, so is what the demo needs.
demo: $(if $(wildcard .venv/installed),install,.venv/demo)
	rm -rf runs/mnist
	$(PY) examples/train_mnist.py

test: install
	$(PY) -m pytest $(RANKS)

# And what is marked `full`.
test-all: install
	$(PY) -m pytest $(RANKS) -m ""

# Lint, and of the suite what tells most for its time; `make test` before a change is handed in.
check: lint
	$(PY) -m pytest $(RANKS) @test/check.txt

lint: install
	$(PY) -m ruff check . && $(PY) -m ruff format --check .
	.venv/bin/lint-imports
	$(PY) -m mypy

size:
	@$(PYTHON) -m benchmarks.size

# The site, in site/: docs/ and the docstrings. A warning fails it. Pages open from the folder;
# search needs a server: python3 -m http.server -d site
docs: install
	PATH="$(CURDIR)/.venv/bin:$$PATH" NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet

bench: install
	$(PY) -m benchmarks.planned
	$(PY) -m benchmarks.compare
	$(PY) -m benchmarks.checkpoints

install: .venv/installed

# uv takes a third of the time of pip, which is there for where uv reaches nothing: it does not read
# pip's settings. Both say what they are at. Without compiled bytecode `import torch_xla` takes 18 s
# in every process of those who set PYTHONDONTWRITEBYTECODE; with it 7.
.venv/installed: extras := examples,hf,lightning,plan,pod,test,lint,docs
.venv/demo: extras := demo
.venv/installed .venv/demo: setup.py
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install -q uv && $(PY) -m uv pip install --compile-bytecode --python $(PY) -e '.[$(extras)]' \
	  || $(PY) -m pip install -e '.[$(extras)]'
	touch $@

clean:
	rm -rf .venv build site *.egg-info
