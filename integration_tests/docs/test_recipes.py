"""The recipes beside the pages: what cannot run without a cluster, a daemon or a dashboard is at least well formed."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import doc_known
import pytest
import yaml
from doc_pages import blocks, pages

from kvmend import registry, settings
from support.interpreter import ROOT

EXAMPLES = ROOT / "docs" / "examples"
DOCKERFILES = sorted((EXAMPLES / "images").glob("*Dockerfile"))
DEPLOYMENTS = sorted((EXAMPLES / "kubernetes").glob("*.yaml"))
DASHBOARD = json.loads((EXAMPLES / "grafana" / "kvmend.json").read_text(encoding="utf-8"))
INSTRUCTIONS = {"ARG", "FROM", "COPY", "RUN", "ENV", "USER", "WORKDIR", "ENTRYPOINT", "CMD", "LABEL", "EXPOSE"}


def known_values() -> dict[str, tuple[str, ...]]:
    """Variable to the values it takes; empty where any text will do."""
    known = {fix.switch: settings.allowed_values(fix) for fix in registry.discover()[0]}
    return known | {settings.MASTER: ("1", "0"), settings.STRICT: ("1", "0"), settings.STATE_DIR: ()}


def may_be_set(name: str, value: str) -> bool:
    if name.startswith("KVMEND"):
        allowed = known_values()[name]
        return not allowed or value in allowed
    return name not in {"FD_PLUGINS", "VLLM_PLUGINS"} or "kvmend" in value.split(",")


# Images -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_is_one_layer_that_fails_where_kvmend_does_not_know_the_source(file: Path) -> None:
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    parsed = [line.partition(" ")[::2] for line in lines]
    assert {name for name, _ in parsed} <= INSTRUCTIONS
    assert [name for name, _ in parsed][:2] == ["ARG", "FROM"], "the tag is chosen by whoever builds"
    assert parsed[1][1].endswith(":${TAG}")
    assert lines[-1].endswith("&& kvmend check"), "a source that is not known must fail the build"
    for name, rest in parsed:
        if name == "RUN":
            assert shlex.split(rest)
        if name == "ENV":
            variable, _, value = rest.partition("=")
            assert may_be_set(variable, value), rest
    said = file.read_text(encoding="utf-8").splitlines()[0]
    assert f"-f docs/examples/images/{file.name} " in said


# Kubernetes ---------------------------------------------------------------------------------------------------------


def containers(file: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each container of a file with the specification of its pod."""
    for document in yaml.safe_load_all(file.read_text(encoding="utf-8")):
        assert document["kind"] == "Deployment"
        assert document["apiVersion"] == "apps/v1"
        template = document["spec"]["template"]
        assert document["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        for container in template["spec"]["containers"]:
            yield container, template["spec"]


@pytest.mark.parametrize("file", DEPLOYMENTS, ids=lambda file: file.name)
def test_a_deployment_keeps_its_reports_on_a_volume_of_the_pod_and_probes_them(file: Path) -> None:
    found = list(containers(file))
    server, pod = found[0]
    variables = {each["name"]: each["value"] for each in server["env"]}
    assert all(isinstance(value, str) for value in variables.values()), "Kubernetes takes texts only"
    assert all(may_be_set(name, value) for name, value in variables.items())
    state = variables[settings.STATE_DIR]
    (mount,) = [each for each in server["volumeMounts"] if each["mountPath"] == state]
    (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
    assert "emptyDir" in volume
    assert server["startupProbe"]["exec"]["command"] == ["kvmend", "status", "--state-dir", state]
    assert set(server["readinessProbe"]["httpGet"]) == {"path", "port"}
    assert server["readinessProbe"]["httpGet"]["port"] in {each["name"] for each in server["ports"]}
    assert "livenessProbe" not in server
    for container, spec in found:
        mounted = {each["name"] for each in container.get("volumeMounts", ())}
        assert mounted <= {each["name"] for each in spec["volumes"]}
        assert not re.search(r":(latest)?$", container["image"])


# Prometheus and Grafana ---------------------------------------------------------------------------------------------


def expressions() -> Iterator[tuple[str, str]]:
    """Every PromQL expression with its place."""
    for page in pages():
        yield from ((block.name, block.text) for block in blocks(page) if block.language == "promql")
    for group in yaml.safe_load((EXAMPLES / "prometheus" / "rules.yaml").read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            yield f"rules.yaml: {rule.get('alert') or rule['record']}", rule["expr"]
    for panel in DASHBOARD["panels"]:
        yield from ((f"kvmend.json: {panel['title']}", target["expr"]) for target in panel["targets"])


_FUNCTIONS = {"sum", "rate", "time", "max", "min", "increase", "label_values"}
_WORDS = {"by", "on", "and", "or", "unless", "without", "group_left"}


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_an_expression_is_balanced_and_names_series_and_functions_that_exist(where: str, expression: str) -> None:
    bare = re.sub(r'"[^"]*"', '""', expression)
    for opening, closing in ("()", "{}", "[]"):
        assert bare.count(opening) == bare.count(closing)
    series = set(re.findall(r"\b(?:vllm:|fastdeploy:|kvmend_)[a-z_]+[a-z]", bare))
    assert series
    assert series <= doc_known.families()
    called = set(re.findall(r"\b([a-z_]+)\s*\((?!\s*(?:instance|host|fix|model_name|pid)\b)", bare)) - _WORDS
    assert called <= _FUNCTIONS
    counters = {name for name in series if name.endswith("_total")}
    ranged = set(re.findall(r"\b([a-z_:]+)(?:\{[^}]*\})?\[", bare))
    assert ranged == counters, "a counter is only ever looked at through rate()"


def test_a_label_that_selects_a_counter_of_a_fix_names_one() -> None:
    counters = {(fix.id, name) for fix in registry.discover()[0] for name in fix.counters}
    for where, expression in expressions():
        for selector in re.findall(r"\{([^}]*)\}", expression):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', selector))
            if "fix" in labels and "counter" in labels:
                assert (labels["fix"], labels["counter"]) in counters, where


def test_the_rules_are_rules() -> None:
    document = yaml.safe_load((EXAMPLES / "prometheus" / "rules.yaml").read_text(encoding="utf-8"))
    for group in document["groups"]:
        assert set(group) == {"name", "rules"}
        for rule in group["rules"]:
            if "alert" in rule:
                assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
                assert re.fullmatch(r"\d+m", rule["for"])
            else:
                assert set(rule) == {"record", "expr"}
    jobs = yaml.safe_load((EXAMPLES / "prometheus" / "scrape.yaml").read_text(encoding="utf-8"))["scrape_configs"]
    assert [job["job_name"] for job in jobs] == ["vllm", "kvmend"]


def test_the_dashboard_can_be_imported() -> None:
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= set(DASHBOARD)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells = set()
    for panel in DASHBOARD["panels"]:
        assert {"type", "title", "description", "gridPos", "targets", "fieldConfig", "datasource"} <= set(panel)
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, f"{panel['title']} lies over another panel"
        cells |= own
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
    used = set(
        re.findall(r"\$(\w+)", "".join(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]))
    )
    assert used <= {variable["name"] for variable in DASHBOARD["templating"]["list"]}
