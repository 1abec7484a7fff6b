"""docker/ held to the tools that will read it: docker-compose, promtool, kubernetes-validate, a live Prometheus."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path

import httpx
import jsonschema
import pytest
import yaml

from clients.python.local_server import LocalServer, free_ports
from engine.serving.frontend import metric_families
from tests.clients.conftest import Shim, server, shim, triton  # noqa: F401  (fixtures)
from tests.docker.test_files import DOCKER, expressions
from tests.serving.frontend.test_metrics import VLLM_NAMES

pytestmark = pytest.mark.xdist_group("deploy")


def needs(command: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        shutil.which(command) is None, reason=f"{command} is not installed (make test-docker installs it, as root)"
    )


def run(*command: str | Path, cwd: Path = DOCKER) -> str:
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@needs("docker-compose")
@pytest.mark.parametrize(
    "profiles",
    [
        *(pytest.param(alone, marks=pytest.mark.slow) for alone in (["gpu"], ["cpu"])),
        ["cpu", "load"],
        ["gpu", "load", "perf"],
    ],
    ids=" ".join,
)
def test_compose_reads_every_profile(profiles: list[str]) -> None:
    flags = [flag for profile in profiles for flag in ("--profile", profile)]
    shown = yaml.safe_load(run("docker-compose", *flags, "config"))
    assert {"openai", "prometheus", "grafana"} <= set(shown["services"])


@needs("promtool")
def test_prometheus_accepts_the_configuration_and_the_alerts_pass_their_tests() -> None:
    run("promtool", "check", "config", "prometheus/prometheus.yml")
    run("promtool", "test", "rules", "prometheus/alerts_test.yml")


@pytest.mark.parametrize("name", ["triton", "openai"])
def test_manifests_fit_the_kubernetes_schemas(name: str) -> None:
    run(Path(sys.executable).with_name("kubernetes-validate"), "--strict", f"kubernetes/{name}.yaml")


# The fields of LeaderWorkerSet v1; pods are held to Kubernetes' own schemas.
POLICIES = ["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]
TEMPLATE = {
    "type": "object",
    "additionalProperties": False,
    "required": ["workerTemplate"],
    "properties": {
        "leaderTemplate": {"type": "object"},
        "workerTemplate": {"type": "object"},
        "size": {"type": "integer", "minimum": 1},
        "restartPolicy": {"enum": POLICIES},
        "subGroupPolicy": {"type": "object"},
        "volumeClaimTemplates": {"type": "array"},
        "persistentVolumeClaimRetentionPolicy": {"type": "object"},
    },
}
LEADER_WORKER_SET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["leaderWorkerTemplate"],
    "properties": {
        "replicas": {"type": "integer", "minimum": 0},
        "leaderWorkerTemplate": TEMPLATE,
        "rolloutStrategy": {"type": "object"},
        "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
        "networkConfig": {"type": "object"},
    },
}


def test_the_leader_worker_set_has_its_fields_and_its_pods_fit_the_schemas(tmp_path: Path) -> None:
    *others, group = yaml.safe_load_all((DOCKER / "kubernetes/leaderworkerset.yaml").read_text())
    assert (group["apiVersion"], group["kind"]) == ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet")
    jsonschema.validate(group["spec"], LEADER_WORKER_SET)
    template = group["spec"]["leaderWorkerTemplate"]
    pods = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": name.lower()}, "template": template[name]}
        for name in ("leaderTemplate", "workerTemplate")
    ]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all([*others, *pods]))
    run(Path(sys.executable).with_name("kubernetes-validate"), "--strict", str(tmp_path / "all.yaml"))


@needs("prometheus")
def test_every_query_of_the_dashboard_and_the_alerts_finds_series(
    server: LocalServer,  # noqa: F811
    shim: Shim,  # noqa: F811
    tmp_path: Path,
) -> None:
    """A live Prometheus over a live server: no query is an error, and all but those about GPUs have an answer."""
    (port,) = free_ports(1)
    targets = {"triton": server.metrics, "openai": shim.host}
    config = {
        "global": {"scrape_interval": "500ms", "scrape_timeout": "450ms"},
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": [target]}]} for job, target in targets.items()
        ],
    }
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"])
    try:
        until = time.monotonic() + 12
        while time.monotonic() < until:
            body = {"model": "demo", "prompt": "some words " * 40, "max_tokens": 8}
            httpx.post(f"{shim.url}/v1/completions", json=body, timeout=30)
        asked = [*expressions(), *vllm_expressions()]
        empty = [text for text in asked if not ask(port, text) and "nv_gpu" not in text]
    finally:
        process.terminate()
        process.wait()
    # An alert that does not fire has no series; what it compares is asked for by the dashboard too.
    alerts = {text for text in empty if any(sign in text for sign in ("> ", "== 0"))}
    assert set(empty) == alerts, set(empty) - alerts


def vllm_expressions() -> list[str]:
    """The queries of vLLM's published dashboards, by their shape: a histogram's buckets, its mean, or the series."""
    by_model = '{model_name="demo", engine=~".*"}'
    found = []
    for name in sorted(VLLM_NAMES):
        if name in metric_families.HISTOGRAMS or name == metric_families.STEP_TOKENS:
            rate = {part: f"rate({name}_{part}{by_model}[$__rate_interval])" for part in ("bucket", "sum", "count")}
            found.append(f"histogram_quantile(0.99, sum by(le) ({rate['bucket']}))")
            found.append(f"{rate['sum']} / {rate['count']}")
        elif name.endswith("_total"):
            found.append(f"rate({name}{by_model}[$__rate_interval])")
        else:
            found.append(f"{name}{by_model}")
    return found


def ask(port: int, expression: str) -> list[object]:
    for name, value in {"$__rate_interval": "10s", "$model": ".*"}.items():
        expression = expression.replace(name, value)
    url = f"http://127.0.0.1:{port}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(url, timeout=10) as answer:
        told = json.load(answer)
    assert told["status"] == "success", told
    return list(told["data"]["result"])
