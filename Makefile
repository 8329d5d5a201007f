# Two commands do everything from an empty machine with Python 3.11 and make: `make demo` and `make test`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
RUN := .venv/bin

.PHONY: demo test bench clean

demo: .venv/ready  ## a small sweep of the polynomial experiment and the report of it (one minute)
	$(RUN)/neurocoder sweep polynomial --budget smoke --seeds 1 --workers 2 --setting plain \
		--model linear hypernet neurocoder-single neurocoder-multi --runs runs/demo
	$(RUN)/neurocoder report --results runs/demo/results --out runs/demo/report.html

test: .venv/ready  ## style, types and tests
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/pyright
	$(RUN)/pytest

bench: .venv/ready  ## speed and memory against nn.Linear and nn.Conv2d, as ratios
	$(RUN)/neurocoder bench --out benchmarks/results/layers.json

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --editable ".[lab,cluster,dev]"
	touch $@

clean:  ## remove the environment and what tools left behind
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info
