# Each target does all of its own set-up: a bare Debian machine with Python 3.11 is enough.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -q
# The CPU build of torch: plain "torch" would fetch gigabytes of CUDA libraries that no test here can use.
TORCH ?= torch==2.13.0
SGLANG ?= sglang==0.5.21
# What is built here cannot run without a GPU: one architecture shows that it compiles, in half of the time. Wheels and
# build-gpu have all of them.
CUDA_ARCHITECTURES ?= 90
CXX_SOURCES = $(shell find eep_cuda tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help setup setup-sglang build native system-packages build-gpu test test-long rdma-packages test-rdma test-gpu test-gpu-sglang sanitize sanitize-address sanitize-thread soak lint format bench bench-membership bench-collectives bench-hosts bench-detection bench-host-loss bench-failover bench-context bench-takeover bench-shrink bench-gpu bench-serving-gpu demo demo-gpu drill drill-gpu demo-exchange clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(VENV)/.ready  ## virtual environment with everything the other targets need

# Apart from the rest, so that what is native can be built while packages are fetched.
$(VENV)/.tools: Makefile
	command -v g++ >/dev/null || { apt-get update -q && apt-get install -qy g++; }
	# Without its headers the library is built all the same, and says so when a second host is asked for.
	test -e /usr/include/rdma/fabric.h || { apt-get update -q && apt-get install -qy --no-install-recommends libfabric-dev; } || \
	    echo "could not install libfabric-dev: the native library is built without links between hosts"
	$(PYTHON) -c 'import ensurepip' 2>/dev/null || { apt-get update -q && apt-get install -qy python3-venv; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) cmake==4.4.4 ninja==1.13.2
	touch $@

# An editable install knows where each package was; one that was added or moved asks for it again.
$(VENV)/.ready: $(VENV)/.tools pyproject.toml $(shell find eep sglang_patches -name __init__.py)
	$(PIP) $(TORCH)
	# Without the native libraries: "make build" puts those of the tree beside the sources.
	$(PIP) --config-settings=wheel.cmake=false -e '.[dev,backup]'
	touch $@

setup-sglang: $(VENV)/.sglang  ## SGLang for a CPU, in the same environment

# Without its own requirements, which are CUDA libraries for the most part. Another version, with the torch that it asks for,
# in an environment of its own: make demo VENV=.venv-17 TORCH=torch==2.11.0 SGLANG=sglang==0.5.17
$(VENV)/.sglang: $(VENV)/.ready $(wildcard sglang_patches/cpu/requirements*.txt)
	$(PIP) -r sglang_patches/cpu/requirements-$(subst sglang==,,$(SGLANG)).txt
	$(PIP) --no-deps $(SGLANG)
	touch $@

# Debian names. Where they cannot be had, the tests that need them are skipped and say so.
system-packages:  ## etcd, spin, iproute2, openssl, libibverbs1, chromium, prometheus, zsh and fish, which some tests need
	{ command -v etcd && command -v spin && command -v ip && command -v openssl && dpkg -s libibverbs1; } > /dev/null 2>&1 || \
	    { apt-get update -q && apt-get install -qy --no-install-recommends etcd-server spin iproute2 openssl libibverbs1; } || \
	    echo "could not install etcd-server, spin, iproute2, openssl and libibverbs1: tests that need them will be skipped"
	{ command -v chromedriver && command -v promtool; } > /dev/null 2>&1 || \
	    { apt-get update -q && apt-get install -qy --no-install-recommends chromium chromium-driver prometheus; } || \
	    echo "could not install chromium, chromium-driver and prometheus: tests that need them will be skipped"
	{ command -v zsh && command -v fish; } > /dev/null 2>&1 || \
	    { apt-get update -q && apt-get install -qy --no-install-recommends zsh fish; } || \
	    echo "could not install zsh and fish: tests that need them will be skipped"

build: setup native  ## the native library, built into eep/lib (incremental)

native: $(VENV)/.tools
	$(VENV)/bin/cmake -G Ninja -S eep_cuda -B build/dev -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURES) \
	    -DEEP_OUTPUT_DIRECTORY=$(CURDIR)/eep/lib > build.log || { cat build.log; exit 1; }
	env -u MAKEFLAGS $(VENV)/bin/cmake --build build/dev

# Most tests wait for processes, so four files at a time. While one server starts, which one core does, another is tested.
test: system-packages setup-sglang build sanitize  ## every test that this machine can run
	$(PY) -m pytest -n 4 --dist loadfile --durations 12 -m "not long" --ignore tests/sglang --ignore tests/rdma
	$(PY) -m pytest -n 2 --dist loadgroup --durations 12 -m "not long" tests/sglang

test-long: system-packages setup-sglang build  ## servers that grow, that lose experts, and that are killed for longer; more schedules; and test-rdma
	$(PY) -m pytest -m long tests/sglang tests/control tests/experts tests/membership tests/process_group
	$(MAKE) test-rdma

# The kernel of the guests is Debian's too. It is fetched into build/rdma, and not installed.
RDMA_QEMU := $(if $(filter aarch64,$(shell uname -m)),qemu-system-arm,qemu-system-x86)
RDMA_PACKAGES := $(RDMA_QEMU) busybox-static iproute2 libfabric1 ibverbs-providers
rdma-packages:
	dpkg -s $(RDMA_PACKAGES) > /dev/null 2>&1 || { \
	    echo "installing what test-rdma needs: $(RDMA_PACKAGES)"; \
	    apt-get update -q && apt-get install -qy --no-install-recommends $(RDMA_PACKAGES); }

test-rdma: rdma-packages build  ## dispatch and combine over verbs: two emulated machines with soft-RoCE, one is lost and returns; installs QEMU with apt
	$(PY) -m pytest --durations 3 -s tests/rdma

build-gpu:  ## the native libraries with the CMake, g++ and nvcc that are there
	cmake -G Ninja -S eep_cuda -B build/gpu -DCMAKE_BUILD_TYPE=Release -DEEP_OUTPUT_DIRECTORY=$(CURDIR)/eep/lib > build.log
	cmake --build build/gpu

test-gpu: build-gpu  ## the GPU tests, with MPS and without; needs only the Python, torch and pytest that are there
	bash tests/gpu/with_mps.sh $(PYTHON) -m pytest --ignore tests/gpu/sglang tests/gpu
	$(PYTHON) -m pytest --ignore tests/gpu/sglang tests/gpu -k "two_and_eight or thousand"
	$(PYTHON) -m pytest -m without_mps tests/gpu

test-gpu-sglang: build-gpu  ## the SGLang server with several ranks on one GPU; needs a Python that has SGLang for CUDA
	$(PYTHON) tests/gpu/in_tree.py build/gpu/in-tree
	PYTHONPATH=$(CURDIR):$(CURDIR)/build/gpu/in-tree:$${PYTHONPATH:-} $(PYTHON) -m pytest tests/gpu/sglang

sanitize: sanitize-address sanitize-thread  ## the C++ core under AddressSanitizer and ThreadSanitizer

sanitize-address sanitize-thread: sanitize-%: $(VENV)/.tools
	$(VENV)/bin/cmake -G Ninja -S eep_cuda -B build/$* -DCMAKE_MAKE_PROGRAM=$(abspath $(VENV))/bin/ninja \
	    -DCMAKE_BUILD_TYPE=RelWithDebInfo -DEEP_SANITIZE=$* > /dev/null
	env -u MAKEFLAGS $(VENV)/bin/cmake --build build/$*
	build/$*/eep_core_test

soak: setup-sglang build  ## fault points and random membership schedules until stopped (or SOAK_SECONDS=n); seeds that fail are kept. SOAK_DEATHS=1000: first, does a server grow with so many deaths of ranks?
	$(if $(SOAK_DEATHS),$(PY) -m bench.soak --deaths $(SOAK_DEATHS))
	$(PY) -m tests.soak $(SOAK_SECONDS)

lint: build  ## ruff, mypy, clang-format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_SOURCES)

.PHONY: docs
docs: setup  ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

format: setup  ## rewrite the sources in the project's style
	$(VENV)/bin/ruff check --fix . || true
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CXX_SOURCES)

bench: system-packages build  ## dispatch, combine and expert repair; tables, JSON and plots in bench/results
	$(PY) -m bench.exchange
	$(PY) -m bench.repair

bench-membership: build  ## how long a lost rank is felt, and what a view change costs as instances grow
	$(PY) -m bench.membership

bench-collectives: build  ## collectives of the backend eep against those of gloo
	$(PY) -m bench.collectives

bench-serving-gpu: build-gpu  ## four ranks against one on a GPU, and where the time of their steps goes; needs SGLang for CUDA
	$(PYTHON) tests/gpu/in_tree.py build/gpu/in-tree
	PYTHONPATH=$(CURDIR):$(CURDIR)/build/gpu/in-tree:$${PYTHONPATH:-} $(PYTHON) -m bench.serving --device cuda

bench-hosts: system-packages build  ## dispatch and combine, and collectives, between two hosts, which are network namespaces; needs root
	$(PY) -m bench.hosts
	$(PY) -m bench.collectives --hosts 2 --ranks 2 4

bench-detection: system-packages build  ## how soon a lost rank or host is known on other hosts, which are network namespaces; needs root
	$(PY) -m bench.detection

bench-host-loss: system-packages build setup-sglang  ## what the loss of a rank and of a host costs the clients of another; needs root
	$(PY) -m bench.host_loss

bench-failover: build setup-sglang  ## what a kill costs the clients of the real SGLang server, and what readiness costs
	$(PY) -m bench.failover

bench-context: build setup-sglang  ## what a kill costs requests with long contexts, restored and computed again, and what their copy costs
	$(PY) -m bench.context
	$(PY) -m bench.context.copy_cost

bench-takeover: build setup-sglang  ## how soon ranks are back as spares, and what a server does while they are lost all the time
	$(PY) -m bench.takeover

bench-shrink: build setup-sglang  ## losing 1, 2 and 4 of 8 ranks at once, and 1, 2, 4 and 8 of 16
	$(PY) -m bench.shrink --ranks 8 --lose 1,2,4
	$(PY) -m bench.shrink --ranks 16 --lose 1,2,4,8

bench-gpu:  ## dispatch, combine and collectives on CUDA tensors, several ranks on one GPU; after test-gpu has built the libraries
	PYTHONPATH=. bash tests/gpu/with_mps.sh $(PYTHON) -m bench.exchange --device cuda
	PYTHONPATH=. bash tests/gpu/with_mps.sh $(PYTHON) -m bench.collectives.cuda

demo: build setup-sglang  ## the real SGLang server loses a rank under load, every token checked; timeline.png and .html
	$(PY) examples/serve_and_kill.py

demo-gpu: build-gpu  ## as demo, with four ranks on one GPU and a spare for each; needs a Python that has SGLang for CUDA
	$(PYTHON) tests/gpu/in_tree.py build/gpu/in-tree
	PYTHONPATH=$(CURDIR):$(CURDIR)/build/gpu/in-tree:$${PYTHONPATH:-} $(PYTHON) examples/serve_and_kill.py --device cuda --spares 4

drill: build setup-sglang  ## mixed load and faults at random against the real server, every token checked; SECONDS=, SEED=, CASE=
	$(VENV)/bin/eep drill --case $(or $(CASE),storm-cpu) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(if $(OUT),--out $(OUT))

drill-gpu: build-gpu  ## as drill, with four ranks on one GPU and 64 clients; needs a Python that has SGLang for CUDA
	$(PYTHON) tests/gpu/in_tree.py build/gpu/in-tree
	PYTHONPATH=$(CURDIR):$(CURDIR)/build/gpu/in-tree:$${PYTHONPATH:-} $(PYTHON) -m eep.cli drill --case $(or $(CASE),storm-64) \
	    $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(if $(OUT),--out $(OUT))

demo-exchange: build  ## four processes exchange tokens, one is killed, a replacement joins; takes a few seconds
	$(PY) examples/kill_one.py

clean:  ## remove what the other targets made
	rm -rf build build.log eep/lib $(VENV)
