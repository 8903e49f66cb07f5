# One virtual environment in the checkout, made once and reused until setup.py changes.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
PY := $(VENV)/bin/python
# In the order of test/conftest.py, long files first, and in as many processes as it says.
RANKS := --dist loadfile --no-loadscope-reorder -n auto

# A hundred processes of the tests would compile what is here anew, a second each and more.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-slow test-all test-oldest test-pythons check lint size docs bench install clean

# Where everything is installed, so is what the demo needs.
demo: $(if $(wildcard $(VENV)/installed),install,$(VENV)/demo)
	rm -rf runs/mnist
	$(PY) examples/train_mnist.py

test: install
	$(PY) -m pytest $(RANKS)

# Tests marked `slow`: with `make test`, all that CI runs.
test-slow: install
	$(PY) -m pytest $(RANKS) -m "slow and not full"

# All tests, also those marked `full`, and the integrations a second time with the oldest releases.
test-all: install
	$(PY) -m pytest $(RANKS) -m ""
	$(MAKE) test-oldest

# The tests of the Hugging Face integrations with the oldest releases that [hf] allows.
test-oldest: $(VENV)/oldest-hf/installed
	$(OLDEST) -m pytest $(RANKS) -m "not full" @test/integrations.txt

# An environment for each Python. jax 0.7.1 and import-linter do not exist for Python 3.10, nor libtpu
# 0.0.21 for 3.13: both run the tests that need none of them. Only mypy as 3.12 reads the annotations
# of the numpy that 3.12 gets.
find_python = $$(command -v $$HOME/.pyenv/versions/$(1).*/bin/python || command -v python$(1))
test-pythons:
	$(MAKE) check VENV=.venv-3.11 PYTHON=$(call find_python,3.11)
	$(MAKE) check VENV=.venv-3.12 PYTHON=$(call find_python,3.12) MYPY="--python-version 3.12"
	$(MAKE) install VENV=.venv-3.10 PYTHON=$(call find_python,3.10) extras=demo,test
	.venv-3.10/bin/python -m pytest $(RANKS) @test/pythons.txt
	$(MAKE) install VENV=.venv-3.13 PYTHON=$(call find_python,3.13) extras=demo,test
	.venv-3.13/bin/python -m pytest $(RANKS) @test/pythons.txt

# Lint, and of the suite what tells most for its time; `make test` before a change is handed in.
check: lint
	$(PY) -m pytest $(RANKS) @test/check.txt

lint: install
	$(PY) -m ruff check . && $(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports
	$(PY) -m mypy $(MYPY)

size:
	@$(PYTHON) -m benchmarks.size

# The site, in site/: docs/ and the docstrings. A warning fails it. Pages open from the folder;
# search needs a server: python3 -m http.server -d site
docs: install
	PATH="$(abspath $(VENV))/bin:$$PATH" NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

bench: install
	$(PY) -m benchmarks.planned
	$(PY) -m benchmarks.compare
	$(PY) -m benchmarks.checkpoints

install: $(VENV)/installed

# uv takes a third of the time of pip, which is there for where uv reaches nothing: it does not read
# pip's settings. Both say what they are at. Without compiled bytecode `import torch_xla` takes 18 s
# in every process of those who set PYTHONDONTWRITEBYTECODE; with it 7.
# .venv has the newest releases that [hf] allows, and .venv/oldest-hf the oldest.
$(VENV)/installed: extras := examples,hf,lightning,plan,pod,test,lint,docs
$(VENV)/demo: extras := demo
$(VENV)/installed $(VENV)/demo: setup.py test/newest-hf.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q uv && $(PY) -m uv pip install --compile-bytecode --python $(PY) -c test/newest-hf.txt -e '.[$(extras)]' \
	  || $(PY) -m pip install -c test/newest-hf.txt -e '.[$(extras)]'
	touch $@

# It uses the other packages of .venv.
OLDEST := $(VENV)/oldest-hf/bin/python
$(VENV)/oldest-hf/installed: $(VENV)/installed test/oldest-hf.txt
	$(PY) -m venv --clear --without-pip $(VENV)/oldest-hf
	path() { $$1 -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	  echo "import site; site.addsitedir('$$(path $(realpath $(VENV))/bin/python)')" > "$$(path $(OLDEST))/venv.pth"
	$(PY) -m uv pip install --compile-bytecode --no-deps --python $(OLDEST) -r test/oldest-hf.txt \
	  || $(PY) -m pip --python $(OLDEST) install --no-deps -r test/oldest-hf.txt
	touch $@

clean:
	rm -rf .venv .venv-* build site *.egg-info
