# Every target says what it does as it goes. Set VENV to use another folder, PYTEST_ARGS to pick tests.

VENV ?= .venv
PYTHON = $(VENV)/bin/python
PYTEST_ARGS ?=
# Most tests wait for processes of theirs; two workers keep two cores busy. A file's tests stay together.
PYTEST_WORKERS ?= -n 2 --dist loadfile --no-loadscope-reorder
TEST_EXTRAS = test,report,local,hdfs,s3,sftp

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-long lint format docs cluster cluster-stop clean

help:
	@echo 'make venv       the environment in $(VENV), for use'
	@echo 'make demo       from nothing to a trained model and its report, in ./demo (minutes)'
	@echo 'make test       set up what the tests need, lint, then all tests but the long ones'
	@echo 'make test-long  the long tests as well'
	@echo 'make lint       ruff and mypy'
	@echo 'make format     let ruff lay out the sources'
	@echo 'make docs       the documentation as pages, in build/docs'
	@echo 'make cluster    start a Slurm cluster of 8 nodes on this machine (root); cluster-stop ends it'
	@echo 'make clean      remove what was built here; runs/ and demo/ are kept'
	@echo
	@echo 'PYTEST_ARGS="-k mesh" make test      picks tests'
	@echo 'HPC_TRAIN_REQUIRE=slurm,mpi make test  fails, not skips, where one of these is missing'

venv:
	bash env/setup_venv.sh --venv $(VENV) --extras report,local

demo:
	bash env/demo.sh --venv $(VENV)

test: test-setup lint
	$(PYTHON) -m pytest -m 'not long' $(PYTEST_WORKERS) $(PYTEST_ARGS)

test-long: test-setup lint
	$(PYTHON) -m pytest $(PYTEST_WORKERS) $(PYTEST_ARGS)

.PHONY: test-setup
test-setup:
	bash env/setup_system.sh
	bash env/setup_venv.sh --venv $(VENV) --extras $(TEST_EXTRAS)
	bash env/setup_hadoop.sh --python $(PYTHON) --out $(VENV)/opt/hadoop

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

format:
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

docs:
	bash env/setup_venv.sh --venv $(VENV) --extras docs
	$(PYTHON) -m mkdocs build --strict -f env/mkdocs.yml

cluster:
	slurm/devcluster start

cluster-stop:
	slurm/devcluster stop

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis $(VENV)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
