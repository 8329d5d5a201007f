# Two commands do everything from an empty machine with Python 3.11 and make: `make demo` and `make test`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
RUN := .venv/bin

.PHONY: demo test bench worktree clean

demo: .venv/ready  ## a small sweep of the polynomial experiment and the report of it (one minute)
	$(RUN)/neurocoder sweep polynomial --budget smoke --seeds 1 --workers 2 --setting plain \
		--model linear hypernet neurocoder-single neurocoder-multi --runs runs/demo --results runs/demo/results --dirty
	$(RUN)/neurocoder report --results runs/demo/results --out runs/demo/report.html --dirty

test: .venv/ready  ## style, types and tests
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/pyright
	$(RUN)/pytest

bench: .venv/ready  ## speed and memory against nn.Linear and nn.Conv2d, as ratios
	$(RUN)/neurocoder bench --out benchmarks/results/layers.json

# Results count only if committed code made them: sweep from such a copy, and go on building here.
#   make worktree && cd ../$(notdir $(CURDIR))-sweep
#   .venv/bin/neurocoder sweep NAME --runs $(CURDIR)/runs --results $(CURDIR)/results
worktree:  ## ../<this folder>-sweep: the last commit, clean, with an environment of its own
	git worktree add --detach ../$(notdir $(CURDIR))-sweep HEAD 2>/dev/null \
		|| git -C ../$(notdir $(CURDIR))-sweep checkout --quiet --detach $$(git rev-parse HEAD)
	$(MAKE) -C ../$(notdir $(CURDIR))-sweep .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --editable ".[lab,cluster,dev]"
	touch $@

clean:  ## remove the environment and what tools left behind
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info
