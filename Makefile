# make serve: the demo model, served. make test: everything that CI checks.
# make install EXTRA=cuda installs the CUDA builds of PyTorch and FBGEMM instead of the CPU ones;
# what is installed stays until make clean.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3.14 || command -v python3)
VENV := .venv
EXTRA ?= $(if $(wildcard $(VENV)/.installed-cuda),cuda,cpu)
BIN := $(VENV)/bin
SERVER := $(VENV)/.installed-$(EXTRA)
INSTALLED := $(VENV)/.installed-dev
INSTALL := $(BIN)/python tools/install_packages.py
PROJECTS := pyproject.toml clients/pyproject.toml
STORE ?= store
HTTP_PORT ?= 8000
GRPC_PORT ?= 8001
TORCHREC := 1.8.0

.PHONY: install serve test lint types contracts pytest properties image image-test cluster-test test-gpu gpu-check hostile fuzz soak soak-deltas swaps swaps-killed proto docs lock dist install-test format bench bench-peers bench-large bench-copy clean

install: $(INSTALLED)

# What serving and the demo need. torchrec requires fbgemm-gpu, the CUDA build, so on the CPU it
# comes without its dependencies: pyproject.toml lists the others.
$(SERVER): $(PROJECTS)
	@echo "embedserve and what serving needs go into $(VENV), 1.1 GB with PyTorch for the CPU:"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(INSTALL) --editable clients --editable ".[$(EXTRA)]"
ifeq ($(EXTRA),cpu)
	$(INSTALL) --no-deps torchrec==$(TORCHREC)
endif
	touch $@

# What the tests and the other targets need besides. Resolved with the server: grpcio-tools wants an
# older protobuf than the newest packages of grpcio, which then have to be older, too.
$(INSTALLED): $(SERVER)
	$(INSTALL) --editable clients --editable ".[$(EXTRA)]" --group dev
	touch $@

serve: $(SERVER)
	$(BIN)/embedserve demo $(STORE) --if-missing
	$(BIN)/embedserve serve $(STORE) --default-model movies --labels $(STORE)/movies.labels.json \
	    --http-port $(HTTP_PORT) --grpc-port $(GRPC_PORT)

test: install lint types contracts pytest

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_prose.py server model_store clients bench tools tests

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install
	$(BIN)/mypy

contracts: install
	PYTHONPATH=server:model_store:clients:proto $(BIN)/lint-imports

# Tests and the servers that they start share the cores: threads of each that wait for each other
# at a barrier would take them. What is compiled is kept, also where Python is told otherwise: the
# tests start it some hundreds of times.
pytest: install
	deploy/install-debian-packages.sh
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not soak and not image and not cluster" -n auto --dist loadfile --no-loadscope-reorder

# The property tests alone, with other random inputs in each run: CHECK="--hypothesis-seed 7".
properties: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "hypothesis and not soak" -n auto --hypothesis-profile random $(CHECK)

# The server's image, from the locks. deploy/build-image.sh explains ENGINE, BASE, VARIANT and IMAGE;
# BUILD is passed on to the engine.
image:
	docker info >/dev/null 2>&1 || deploy/install-debian-packages.sh image
	deploy/build-image.sh $(BUILD)

# Starts that image with podman, as root, in a network namespace that has no way out.
image-test: install
	deploy/install-debian-packages.sh image
	tests/interop/in_namespace.sh $(BIN)/python -m pytest -q -n0 -s -m image tests/interop/test_image.py

# Runs that image on one node of Kubernetes 1.20, as root, in such a namespace. Kubernetes is built
# first, from Debian's source, and kept in build/.
cluster-test: install
	deploy/install-debian-packages.sh cluster
	tests/interop/cluster/build_kubernetes.sh build/interop/kubernetes
	tests/interop/in_namespace.sh $(BIN)/python -m pytest -q -n0 -s -m cluster tests/interop/cluster

test-gpu: install
	$(BIN)/python -m pytest -q -m gpu tests/engine

# Whether lookups on the GPUs are right, and how fast, until the first wrong answer; of CPU ranks:
# CHECK="--devices cpu:2 --quick".
gpu-check: install
	PYTHONPATH=server:model_store:clients:proto:tests:bench $(BIN)/python -W ignore bench/gpu_check.py $(CHECK)

# What each hostile act costs a neighbour, with the server on a core of its own.
hostile: install
	taskset -c 1 $(BIN)/python -m pytest -n0 -v -m "not soak" tests/hostile

# Minutes of wrong requests to a server of its own: FUZZ="--minutes 30 --seed 7 --output folder".
fuzz: install
	PYTHONPATH=server:model_store:clients:proto:tests:bench:tools $(BIN)/python -m fuzz.fuzz $(FUZZ)

# An hour of load, overload, kills, hangs, restarts and rude clients, on a server of its own:
# SOAK="--minutes 60 --seed 7 --output folder".
soak: install
	PYTHONPATH=server:model_store:clients:proto:tests:bench:tools $(BIN)/python -W ignore -m soak.soak $(SOAK)

# Half an hour of deltas, undos, compactions and kills under load: SOAK="--minutes 30 --kills 30"; with
# ids that come and go, and an alias that is moved between deltas: SOAK="--ids --alias".
soak-deltas: install
	PYTHONPATH=server:model_store:clients:proto:tests:bench:tools $(BIN)/python -W ignore -m soak.deltas $(SOAK)

# A hundred changes of the version that answers, under full load: SWAPS="--swaps 100 --workers 2";
# of a router over shards: SWAPS="--parts 2 --replicas 2"; of NVIDIA's Triton, which is installed
# first: SWAPS="--server triton".
swaps: install
	PYTHONPATH=server:model_store:clients:proto:tests:bench:tools $(BIN)/python -W ignore -m swaps.swaps $(SWAPS)

# kill -9 at every moment of such changes: SWAPS="--kills 60".
swaps-killed: install
	PYTHONPATH=server:model_store:clients:proto:tests:bench:tools $(BIN)/python -W ignore -m swaps.killed $(SWAPS)

# The generated code beside the .proto files is committed; a test compares it.
proto: install
	cd proto && ../$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. \
	    --grpc_python_out=. embedserve_proto/embedding.proto embedserve_proto/open_inference.proto \
	    embedserve_proto/predictor.proto

# docs/settings.md, docs/metrics.md, docs/cli.md and the Kubernetes resource of Prometheus' rules are
# committed, too; a test compares them.
docs: install
	PYTHONPATH=server:model_store:clients:proto $(BIN)/python docs/generate.py

# The versions and hashes of all that an image has; deploy/lock.sh says where it looks for them.
lock: install
	$(BIN)/python -m pip install --quiet uv
	UV=$(BIN)/uv deploy/lock.sh

# Wheels and sdists of both distributions; the same commit gives the same bytes.
dist: install
	PYTHON=$(CURDIR)/$(BIN)/python deploy/build-dist.sh dist

# Five commands of a stranger in an empty Debian; as root, with debootstrap and a package index.
install-test: dist
	deploy/install-test.sh dist

# Needs two cores, and wrk, h2load and redis-benchmark. Peers that are not installed are left out.
bench: $(VENV)/.installed-bench
	$(BIN)/python bench/run.py $(BENCH)

bench-peers: $(VENV)/.installed-bench
	$(BIN)/python bench/run.py --install

$(VENV)/.installed-bench: $(INSTALLED)
	$(INSTALL) --group bench
	touch $@

# Needs 30 GB of disk and some minutes.
bench-large: install
	PYTHONPATH=server:model_store:clients:proto:tests $(BIN)/python -W ignore bench/large_table.py

# A store of 10 GB copied and restored, beside cp, and killed; needs 30 GB of disk. Through an S3
# server: COPY="--gigabytes 3 --s3".
bench-copy: install
	PYTHONPATH=server:model_store:clients:proto:tests $(BIN)/python -W ignore bench/copy_store.py $(COPY)

clean:
	rm -rf $(VENV) store dist build
