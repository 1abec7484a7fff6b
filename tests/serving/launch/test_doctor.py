"""What `nereid doctor` says of the hosts that a launcher has started."""

from __future__ import annotations

import socket

import pytest

from engine.serving.launch.doctor import Finding, _hosts, _tuned
from tests.e2e.harness import free_ports


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def said() -> list[tuple[bool, str]]:
    return [(finding.ok, finding.found) for finding in _hosts()]


def test_one_host_has_nothing_to_say(hosts: pytest.MonkeyPatch) -> None:
    hosts.delenv("WORLD_SIZE")
    assert said() == []


def test_the_first_host_is_at_its_address(hosts: pytest.MonkeyPatch) -> None:
    assert said() == [(True, "number 0 of 2; the first at 127.0.0.1, port 29500")]
    hosts.setenv("MASTER_ADDR", "192.0.2.1")
    (finding,) = _hosts()
    assert isinstance(finding, Finding)
    assert not finding.ok
    assert finding.remedy.startswith("the first host cannot listen at MASTER_ADDR 192.0.2.1")


def test_another_host_reaches_the_first(hosts: pytest.MonkeyPatch) -> None:
    hosts.setenv("RANK", "1")
    with socket.create_server(("127.0.0.1", 0)) as first:
        hosts.setenv("MASTER_PORT", str(first.getsockname()[1]))
        assert said()[1] == (True, "it listens")
    hosts.setenv("MASTER_PORT", str(free_ports(1)[0]))
    assert said()[1] == (False, "Connection refused")


def test_it_says_which_tuned_numbers_a_gpu_has() -> None:
    found = {finding.what: finding.found for finding in _tuned(["NVIDIA A10", "NVIDIA H100 80GB HBM3", "NVIDIA H200"])}
    assert found["tuned numbers of NVIDIA A10"].startswith("kernels/tuned/default.json: no numbers of this GPU")
    assert found["tuned numbers of NVIDIA H100 80GB HBM3"].startswith("kernels/tuned/h100.json: numbers of an H200")
    assert found["tuned numbers of NVIDIA H200"].startswith("kernels/tuned/h200.json: measured on an H200")
