# Short names for tox environments; the first use makes .venv with tox in it. Needs Python 3.11+ and no root.

PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TOX := .venv/bin/tox
STORE ?= sqlite
ifndef FDB_SERIES
# That of the FoundationDB client library on this machine: the binding has to fit it. Without a library, the usual one.
FDB_SERIES := $(or $(shell for lib in libfdb_c.so libfdb_c.dylib /usr/local/lib/libfdb_c.dylib; do $(PYTHON) -c \
	"import ctypes; v = ctypes.CDLL('$$lib').fdb_get_max_api_version(); print(f'{v // 100}.{v % 100 // 10}')" \
	2>/dev/null && break; done),7.3)
endif
export FDB_SERIES
ARGS ?=

.PHONY: help tour test test-all matrix floors fdb lint format types bench bench-compare bench-contention bench-tenants bench-history bench-fairness \
	bench-network sim parity fuzz storm network mutate docs release-check doctor clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST)

tour: $(TOX) ## a shop: a flood, a killed worker, an outage, the dashboard, a verdict; STORE=fdb for a FoundationDB node
	$(TOX) run -q -e tour -- --store $(STORE) $(ARGS)

test: $(TOX) ## the tests, on this Python; ARGS="-k fork" goes to pytest
	$(TOX) run -e py -- $(ARGS)

test-all: $(TOX) ## the tests, on every supported Python that is installed
	$(TOX) run -e py311,py312,py313,py314 -- $(ARGS)

matrix: $(TOX) ## the matrix of versions, or one cell of it: make matrix CELL=py312-django52
	$(TOX) run $(if $(CELL),-e $(CELL),-m matrix) $(if $(ARGS),-- $(ARGS))

floors: $(TOX) ## the dashboard, with the oldest versions that it allows
	$(TOX) run -e floors -- $(ARGS)

fdb: $(TOX) ## only the tests that need a real fdbserver
	$(TOX) run -e fdb -- $(ARGS)

lint: $(TOX) ## ruff and import-linter
	$(TOX) run -e lint

format: $(TOX) ## let ruff mend what it can
	$(TOX) exec -e lint -- ruff check --fix .
	$(TOX) exec -e lint -- ruff format .

types: $(TOX) ## mypy, strict
	$(TOX) run -e types

sim: $(TOX) ## a range of simulation seeds: make sim SEEDS="0 500"
	$(TOX) run -q -e sim -- $(or $(SEEDS),0 200)

parity: $(TOX) ## random programs, and Celery in 200 situations, on real brokers and on ours: make parity SEEDS="0 500"
	$(TOX) run -q -e parity -- $(or $(SEEDS),0 500) $(ARGS)

fuzz: $(TOX) ## made-up input for minutes, from a random seed: make fuzz ROUNDS=20000 SEED=0
	FUZZ_ROUNDS=$(or $(ROUNDS),5000) FUZZ_SEED=$(or $(SEED),$(strip $(shell od -An -N4 -tu4 /dev/urandom))) $(TOX) run -q -e fuzz -- $(ARGS)

storm: $(TOX) ## real processes killed, frozen and forked, a full disk, a cluster: make storm ARGS="kills --rounds 50"
	$(TOX) run -q -e storm -- $(ARGS)

network: $(TOX) ## seeded runs among machines in a box, as root: make network ARGS="--runs 10 --seconds 300"
	$(TOX) run -q -e network -- $(ARGS)

mutate: $(TOX) ## changes of kombu_fdb/engine that no test notices: make mutate ARGS="'kombu_fdb.engine.upkeep.release.*'"
	$(TOX) run -q -e mutate -- $(ARGS)

bench-contention: $(TOX) ## competing consumers on a real FoundationDB
	$(TOX) run -q -e bench-contention -- $(ARGS)

bench-tenants: $(TOX) ## one noisy tenant among a hundred, with 8 Celery workers on a real FoundationDB
	$(TOX) run -q -e bench-tenants -- $(ARGS)

bench-fairness: $(TOX) ## what one noisy key does to the others, with a picture
	$(TOX) run -q -e bench-fairness -- $(ARGS)

bench-network: $(TOX) ## what distance between clients and cluster costs, in network namespaces; as root on Linux
	$(TOX) run -q -e bench-network -- $(ARGS)

bench-history: $(TOX) ## what keeping a history costs a worker: ARGS="--rounds 8 --url fdb://"
	$(TOX) run -q -e bench-history -- $(ARGS)

bench-compare: $(TOX) ## two releases of bench/history side by side: ARGS="5.7.0 5.8.0"
	$(TOX) run -q -e bench-compare -- $(ARGS)

bench: $(TOX) ## speed beside Redis and RabbitMQ, where they are found
	$(TOX) run -q -e bench -- $(ARGS)

docs: $(TOX) ## the site, in site/; ARGS=serve to see it while you write
	$(TOX) run -q -e docs -- $(or $(ARGS),build --quiet)

release-check: $(TOX) ## wheel and sdist, checked, installed and tried: make release-check ARGS="--tag v0.2.0"
	$(TOX) run -q -e release-check -- $(ARGS)

doctor: $(TOX) ## check this machine's set-up; ARGS=fdb:// for another URL than the default
	$(TOX) run -q -e doctor -- $(ARGS)

clean: ## remove every environment and cache
	rm -rf mutants site build dist .venv .tox .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(TOX):
	@test -n "$(PYTHON)" || { echo 'No Python 3.11 or newer found; name one: make PYTHON=/path/to/python3 ...' >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo 'Making .venv failed. On Debian and Ubuntu the module is a package of its own: apt install python3-venv' >&2; \
	  echo 'Without root: install uv for this user, run  uv venv --seed .venv  and try again.' >&2; exit 1; }
	@.venv/bin/python -m pip install --quiet 'tox>=4.30' 'tox-uv>=1.25'
