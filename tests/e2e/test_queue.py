"""Admission: a full queue says so, what was admitted is served, and a full server counts as alive."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tritonclient.utils import InferenceServerException

from tests.e2e.harness import Call, Server, wait_until

PROMPT = "A server takes a question and"
HEALTH_CHECK = Path(__file__).parents[2] / "docker" / "healthcheck.py"


def test_full_queue_is_refused_as_unavailable_and_the_others_are_served(server: Server) -> None:
    """16 rows and 24 places in the queue: of 80 requests at once some find no place, and none is lost."""
    fields = json.dumps({"max_tokens": 16, "temperature": 0.0, "ignore_eos": True})
    calls = [Call(server, text_input=f"{PROMPT} {i}", sampling_parameters=fields) for i in range(80)]
    served, refused = 0, []
    for call in calls:
        try:
            call.all()
            served += 1
        except InferenceServerException as error:
            refused.append(str(error))
    assert served >= 24
    assert served + len(refused) == 80
    assert refused, "the queue was never full: this test needs more requests"
    assert all("the queue is full: 24 requests wait and 24 may" in sentence for sentence in refused)


def check(server: Server, model: str, *flags: str) -> subprocess.CompletedProcess[str]:
    where = {
        "HEALTH_URL": f"http://127.0.0.1:{server.http_port}/v2",
        "HEALTH_METRICS": f"http://127.0.0.1:{server.metrics_port}/metrics",
        "HEALTH_MODEL": model,
    }
    words = [sys.executable, HEALTH_CHECK, *flags]
    return subprocess.run(words, env=where, capture_output=True, text=True, timeout=30)


def test_the_readiness_check_hears_of_an_engine_that_hangs_while_tritons_own_does_not(server: Server) -> None:
    assert check(server, "demo", "--ready").returncode == 0
    (engine,) = server.engine_pids("demo")
    os.kill(engine, signal.SIGSTOP)
    try:
        wait_until(lambda: check(server, "demo", "--ready").returncode == 1, "the check hears of it")
        assert "demo: " in check(server, "demo", "--ready").stdout
        assert server.has("demo")
    finally:
        os.kill(engine, signal.SIGCONT)
    wait_until(lambda: check(server, "demo", "--ready").returncode == 0, "the engine goes on")
    assert server.engine_pids("demo") == [engine]
    assert check(server, "unknown", "--ready").returncode == 1


def test_the_health_check_tells_a_full_server_from_a_useless_one(server: Server) -> None:
    assert check(server, "demo").returncode == 0
    fields = json.dumps({"max_tokens": 64, "temperature": 0.0, "ignore_eos": True})
    calls = [Call(server, text_input=f"{PROMPT} {i}", sampling_parameters=fields) for i in range(60)]
    full, unknown = check(server, "demo"), check(server, "unknown")
    for call in calls:
        with contextlib.suppress(InferenceServerException):
            call.all()
    assert full.returncode == 0, full.stdout
    assert unknown.returncode == 1
    assert "unknown model" in unknown.stdout
