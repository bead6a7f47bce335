# Everything here builds what it needs under $(CACHE); it needs python3 with venv, and the package index.
CACHE ?= $(HOME)/.cache/kvmend
TOOLS := $(CACHE)/tools
NOX := $(TOOLS)/bin/nox --envdir $(CACHE)/nox
export KVMEND_CACHE := $(CACHE)

.PHONY: test demo bench lint unit docs vllm engine engine-more upstream fastdeploy fingerprints readme clean help

help:  ## what there is
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "make %-14s %s\n", $$1, $$2}' Makefile

test: $(TOOLS)/.ready  ## everything that CI runs
	$(NOX) -s lint types unit docs fastdeploy vllm vllm_as_released engine

demo: $(TOOLS)/.ready  ## the fault and the fix on the real vLLM engine
	@$(NOX) -s demo -- $(ARGS)

lint: $(TOOLS)/.ready  ## style and types
	$(NOX) -s lint types

unit: $(TOOLS)/.ready  ## the host, on every Python found; make test takes the oldest and the newest
	$(NOX) -s unit unit_between

docs: $(TOOLS)/.ready  ## the documentation as a site in site/, and every command in it
	$(NOX) -s docs docs_from_scratch -- $(ARGS)

vllm: $(TOOLS)/.ready  ## scheduler-level tests on real vLLM releases
	$(NOX) -s vllm vllm_as_released

engine: $(TOOLS)/.ready  ## the real engine, offline and over HTTP
	$(NOX) -s engine

engine-more: $(TOOLS)/.ready  ## the real engine with Ray and LMCache; not a part of make test
	$(NOX) -s engine_more

fastdeploy: $(TOOLS)/.ready  ## FastDeploy tests, on the double and on every tree at hand
	$(NOX) -s fastdeploy

bench: $(TOOLS)/.ready  ## what kvmend costs and what it is worth, into docs/benchmarks.md; ARGS="--quick --trace FILE"
	$(NOX) -s bench -- $(ARGS)

upstream: $(TOOLS)/.ready  ## upstream's own tests, with kvmend and without
	$(NOX) -s upstream

fingerprints: $(TOOLS)/.ready  ## the table of known vLLM sources, anew from the released wheels
	$(NOX) -s fingerprints

readme: $(TOOLS)/.ready  ## the generated parts of the READMEs and the documentation
	$(NOX) -s readme

clean:  ## remove every environment
	rm -rf $(TOOLS) $(CACHE)/nox

$(TOOLS)/.ready: integration_tests/tools.txt
	python3 -m venv --clear $(TOOLS)
	$(TOOLS)/bin/python -m pip install --quiet --disable-pip-version-check -r integration_tests/tools.txt
	touch $@
