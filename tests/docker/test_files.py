"""What can be said of docker/ with nothing but Python: pinned, non-root, consistent, metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from clients.openai.metrics import ShimMetrics
from clients.python.cli import app
from engine import env
from engine.parallel.placement import DEFAULT_PORT, placed
from engine.serving.frontend import metric_families

READY_S = 4  # of docker/healthcheck.py

DOCKER = Path(__file__).resolve().parents[2] / "docker"
IMAGES = sorted(DOCKER.glob("*.Dockerfile"))


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DOCKER / "compose.yaml").read_text()))


def manifests() -> list[dict[str, Any]]:
    files = sorted((DOCKER / "kubernetes").glob("*.yaml"))
    return [one for file in files for one in yaml.safe_load_all(file.read_text())]


def known_metrics() -> set[str]:
    """Every name that the engine and the shim export."""
    engine = {name for table in TABLES for name in table} | {metric_families.STEP_TOKENS}
    shim = {s.name for family in ShimMetrics().registry.collect() for s in family.samples}
    shim |= {
        family.name + suffix for family in ShimMetrics().registry.collect() for suffix in ("", "_total", "_bucket")
    }
    return engine | {f"{name}_bucket" for name in engine} | shim


TABLES: list[Any] = [
    metric_families.GAUGES,
    metric_families.LABELLED_GAUGES,
    metric_families.COUNTERS,
    metric_families.LABELLED_COUNTERS,
    metric_families.HISTOGRAMS,
]


def expressions() -> list[str]:
    board = json.loads((DOCKER / "grafana/dashboards/nereid.json").read_text())
    queries = [t["expr"] for panel in board["panels"] for t in panel.get("targets", ())]
    rules = yaml.safe_load((DOCKER / "prometheus/alerts.yml").read_text())
    return queries + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


def test_dashboard_and_alerts_ask_for_metrics_that_exist() -> None:
    asked = {name for text in expressions() for name in re.findall(r"\b(?:vllm:|nereid:|nereid_)\w+", text)}
    assert asked
    assert asked <= known_metrics(), asked - known_metrics()


def test_every_alert_has_its_part_of_the_runbook() -> None:
    rules = yaml.safe_load((DOCKER / "prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    runbook = (DOCKER.parent / "docs/deploy.md").read_text()
    for rule in rules:
        assert rule["annotations"]["runbook"] == f"docs/deploy.md#{rule['alert'].lower()}"
        assert f"### {rule['alert']}\n" in runbook


@pytest.mark.parametrize("file", IMAGES, ids=lambda file: file.stem)
def test_images_are_pinned_run_as_a_user_and_copy_only_what_there_is(file: Path) -> None:
    text = file.read_text()
    (base,) = re.findall(r"^ARG \w+=(\S+)", text, re.M)
    assert re.search(r":\d+\.\d+", base), f"{base} is not a version"
    assert re.search(r"^USER nereid$", text, re.M)
    for source in re.findall(r"^COPY --chown=nereid (.+) \S+$", text, re.M):
        for name in source.split():
            assert (DOCKER.parent / name).exists(), name
    assert text.index("pyproject.toml") < text.index("COPY --chown=nereid engine"), "packages come before sources"


def test_services_are_pinned_unprivileged_and_behind_loopback_but_the_shim() -> None:
    for name, service in compose()["services"].items():
        assert not service["image"].endswith(("latest", ":")), name
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        if name != "openai":
            assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name


def test_profiles_bring_one_triton_each() -> None:
    services = compose()["services"]
    assert services["triton"]["profiles"] == ["gpu"]
    assert services["triton-cpu"]["profiles"] == ["cpu"]
    assert "COMPOSE_PROFILES=gpu" in (DOCKER / ".env").read_text()
    assert all(
        service["networks"]["default"]["aliases"] == ["triton"]
        for service in (services["triton"], services["triton-cpu"])
    )


def test_the_shim_is_started_with_flags_that_it_has() -> None:
    usage = re.sub(r"\x1b\[[0-9;]*m", "", CliRunner().invoke(app, ["openai", "--help"], env={"COLUMNS": "200"}).output)
    deployment = next(m for m in manifests() if m["kind"] == "Deployment" and m["metadata"]["name"] == "openai")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    for flag in [*compose()["services"]["openai"]["command"], *container["args"]]:
        assert flag.split("=")[0] in usage, flag


def of_kind(kind: str, name: str) -> dict[str, Any]:
    return next(m for m in manifests() if m["kind"] == kind and m["metadata"]["name"] == name)


def group_pods() -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a model on several hosts: the leader's and the others'."""
    template = of_kind("LeaderWorkerSet", "nereid-large")["spec"]["leaderWorkerTemplate"]
    return template["leaderTemplate"], template["workerTemplate"]


def test_hosts_of_a_model_run_commands_that_there_are() -> None:
    (leader,), (worker,) = (pod["spec"]["containers"] for pod in group_pods())
    for command, flags in (("serve", leader["args"]), ("rank", worker["command"][2:])):
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        usage = re.sub(r"\x1b\[[0-9;]*m", "", shown)
        assert "Usage" in usage
        assert {flag for flag in flags if flag.startswith("--")} <= set(re.findall(r"--[\w-]+", usage))
    assert worker["command"][:2] == ["nereid", "rank"]
    assert {"name": "ranks", "containerPort": DEFAULT_PORT} in leader["ports"]
    assert leader["image"] == worker["image"]


def test_probes_of_a_server_ask_the_model_that_it_is_told_of_and_nothing_of_tritons_own() -> None:
    check = ["python3", "/opt/nereid/docker/healthcheck.py"]
    for pod in (of_kind("Deployment", "triton")["spec"]["template"], group_pods()[0]):
        (container,) = pod["spec"]["containers"]
        for probe in ("startupProbe", "readinessProbe"):
            assert container[probe]["exec"]["command"] == [*check, "--ready"]
            assert container[probe]["timeoutSeconds"] > READY_S
        assert container["livenessProbe"]["exec"]["command"] == check
        assert "HEALTH_MODEL" in {variable["name"] for variable in container["env"]}
    (shim,) = of_kind("Deployment", "openai")["spec"]["template"]["spec"]["containers"]
    assert shim["readinessProbe"]["httpGet"]["path"] == "/health"
    services = compose()["services"]
    assert services["triton"]["healthcheck"]["test"] == ["CMD", *check]
    assert "/health'" in services["openai"]["healthcheck"]["test"][-1]


def test_hosts_of_a_model_have_a_gpu_a_rank() -> None:
    group = of_kind("LeaderWorkerSet", "nereid-large")["spec"]["leaderWorkerTemplate"]
    gpus = [pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for pod in group_pods()]
    pod = {"LWS_LEADER_ADDRESS": "x", "LWS_GROUP_SIZE": str(group["size"]), "LWS_WORKER_INDEX": "1"}
    ranks = placed(env.read(pod).launched).ranks(16)
    assert [str(len(ranks))] * 2 == gpus
    assert "parallel.tensor=16" in (DOCKER.parent / "docs/deploy.md").read_text()


def test_only_hosts_of_a_model_reach_each_others_ports() -> None:
    policy = of_kind("NetworkPolicy", "nereid-large")["spec"]
    own = {"leaderworkerset.sigs.k8s.io/name": "nereid-large"}
    assert policy["podSelector"]["matchLabels"] == own
    open_to_all_ports = [rule["from"] for rule in policy["ingress"] if "ports" not in rule]
    assert open_to_all_ports == [[{"podSelector": {"matchLabels": own}}]]
    assert {port["port"] for rule in policy["ingress"] for port in rule.get("ports", ())} == {8001, 8002}
    service = of_kind("Service", "triton-group")["spec"]["selector"].items()
    leader, worker = (pod["metadata"]["labels"].items() for pod in group_pods())
    assert service <= leader
    assert not service <= worker


def test_pods_run_as_a_user_and_select_what_they_label() -> None:
    deployments = [m for m in manifests() if m["kind"] == "Deployment"]
    assert len(deployments) == 2
    for deployment in deployments:
        selected = deployment["spec"]["selector"]["matchLabels"].items()
        assert selected <= deployment["spec"]["template"]["metadata"]["labels"].items()
        assert not any(selected <= pod["metadata"]["labels"].items() for pod in group_pods())
    for pod in (*(deployment["spec"]["template"] for deployment in deployments), *group_pods()):
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
