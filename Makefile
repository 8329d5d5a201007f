# Two commands do everything from an empty machine with Python 3.11 and make: `make demo` and `make test`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
RUN := .venv/bin
SWEEP := $(CURDIR)-sweep
STYLE := $(RUN)/ruff check . && $(RUN)/ruff format --check .
# Two processes of one thread each: with a thread for every core they would wait for each other.
PYTEST := OMP_NUM_THREADS=1 $(RUN)/pytest -n 2 --dist worksteal

.PHONY: help demo test check docs look bench dist worktree clean

help:  ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 12

demo: .venv/ready  ## a small sweep of the polynomial experiment and the report of it (one minute)
	$(RUN)/neurocoder sweep polynomial --budget smoke --seeds 1 --workers 2 --setting plain \
		--model linear hypernet neurocoder-single neurocoder-multi --runs runs/demo --results runs/demo/results --dirty
	$(RUN)/neurocoder report --results runs/demo/results --out runs/demo/report.html --dirty

test: .venv/ready  ## style, types and tests
	$(STYLE)
	$(RUN)/pyright
	$(PYTEST)

check: .venv/ready  ## style, types and the quick tests of the library: for the inner loop, under a minute
	$(STYLE)
	@$(RUN)/pyright & types=$$!; \
		$(PYTEST) -m "not slow" --ignore tests/lab; tests=$$?; wait $$types && exit $$tests

docs: .venv/ready  ## the site, into build/docs/html: a warning is an error
	$(RUN)/sphinx-build --quiet --fail-on-warning --keep-going --nitpicky docs build/docs/html
	@echo "open build/docs/html/index.html"

look: docs  ## pictures of the site in Chromium, desk and phone, light and dark, into build/look
	$(RUN)/python tests/look.py

bench: .venv/ready  ## speed and memory against nn.Linear and nn.Conv2d, as ratios
	$(RUN)/neurocoder bench --out benchmarks/results/layers.json

dist: .venv/ready  ## source distribution and wheel, in dist/
	rm -rf dist
	$(RUN)/python -m build --no-isolation

# Results count only if committed code made them: sweep from such a copy, and go on building here.
worktree:  ## ../<this folder>-sweep: the last commit, clean, with an environment of its own
	@if pgrep -f "$(SWEEP)/[.]venv" > /dev/null; then echo "something runs in $(SWEEP): wait for it, or stop it"; exit 1; fi
	if [ -d $(SWEEP) ]; then git -C $(SWEEP) checkout --quiet --detach $$(git rev-parse HEAD); \
		else git worktree add --detach $(SWEEP) HEAD; fi
	@if [ -n "$$(git -C $(SWEEP) status --porcelain)" ]; then echo "$(SWEEP) has changes of its own"; exit 1; fi
	$(MAKE) -C $(SWEEP) .venv/ready
	@echo "cd $(SWEEP) && .venv/bin/neurocoder sweep NAME --runs $(CURDIR)/runs --results $(CURDIR)/results"

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(RUN)/python -m pip install --quiet --constraint constraints.txt --editable ".[lab,atari,cluster,docs,dev]"
	touch $@

clean:  ## remove the environment and what tools left behind
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info
