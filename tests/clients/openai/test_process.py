"""The shim as a process: keys, shares, TLS, workers, start and end."""

from __future__ import annotations

import functools
import json
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from clients.openai.config import ShimConfig
from clients.openai.workers import addresses
from tests.clients.conftest import Shim

pytestmark = pytest.mark.xdist_group("openai")

BODY = {"model": "demo", "prompt": "def", "max_tokens": 2}
VERSION = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("settings", "base"),
    [
        ({}, "http://localhost:9000"),
        ({"host": "0.0.0.0", "port": 80}, "http://localhost:80"),
        ({"host": "10.0.0.5", "tls_certificate": "c.pem", "tls_key": "k.pem"}, "https://10.0.0.5:9000"),
        ({"host": "fe80::1"}, "http://[fe80::1]:9000"),
    ],
)
def test_where_everything_is_can_be_clicked(settings: dict[str, Any], base: str) -> None:
    said = addresses(ShimConfig(**settings))
    assert re.findall(r"https?://[^\s,]+", said) == [f"{base}/v1", f"{base}/", f"{base}/docs"]
    assert re.findall(r"https?://[^\s,]+", addresses(ShimConfig(**settings, web=False))) == [f"{base}/v1"]


def test_the_log_begins_with_where_everything_is(shim: Shim) -> None:
    port = shim.host.rsplit(":", 1)[1]
    assert f"the chat page at http://localhost:{port}/," in shim.log().splitlines()[0]


def test_keys_from_a_file_and_a_share_of_open_requests_for_each(triton: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alpha\n\nbeta\n")
    shim = Shim(tmp_path, "--triton", triton, "--api-key-file", str(keys), "--max-concurrency-per-key", "1")
    try:
        url = f"{shim.url}/v1/completions"
        alpha, beta = ({"Authorization": f"Bearer {name}"} for name in ("alpha", "beta"))
        assert httpx.post(url, json=BODY).status_code == 401
        long = {**BODY, "max_tokens": 5000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url, json=long, headers=alpha, timeout=30) as response:
            pieces = response.iter_bytes()
            next(pieces)
            refused = httpx.post(url, json=BODY, headers=alpha)
            assert refused.status_code == 429
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert "retry-after" in refused.headers
            assert httpx.post(url, json=BODY, headers=beta, timeout=30).status_code == 200
        end = time.monotonic() + 10
        while httpx.post(url, json=BODY, headers=alpha, timeout=30).status_code != 200:
            assert time.monotonic() < end, "the share was not given back"
            time.sleep(0.1)
        assert "alpha" not in shim.log()
    finally:
        shim.stop()


def test_tls_and_client_certificates(triton: str, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    subprocess.run(command.split(), check=True, capture_output=True)
    flags = ["--tls-certificate", str(certificate), "--tls-key", str(key), "--tls-client-ca", str(certificate)]
    shim = Shim(tmp_path, "--triton", triton, *flags, scheme="https")
    try:
        trusting = ssl.create_default_context(cafile=str(certificate))
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{shim.url}/version", verify=trusting)
        trusting.load_cert_chain(certificate, key)
        assert httpx.get(f"{shim.url}/version", verify=trusting).status_code == 200
    finally:
        shim.stop()


def test_other_forms_of_calls_and_of_thinking_are_chosen_by_flags(triton: str, tmp_path: Path) -> None:
    flags = ["--tool-parser", "llama3", "--reasoning-parser", "think-open"]
    shim = Shim(tmp_path, "--triton", triton, *flags)
    tool = {"type": "function", "function": {"name": "get_time"}}
    try:
        client = openai.OpenAI(base_url=f"{shim.url}/v1", api_key="none", max_retries=0)
        ask = functools.partial(client.chat.completions.create, model="scripted", temperature=0)
        thought = ask(messages=[{"role": "user", "content": "o"}]).choices[0].message
        assert (thought.reasoning_content, thought.content) == ("Hidden thought", "Shown.")
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        (choice,) = ask(messages=[{"role": "user", "content": "l"}], tools=[tool], extra_body=off).choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_time", '{"zone": "UTC"}')
        none = Shim(tmp_path, "--triton", triton, "--tool-parser", "none")
        try:
            body = {"model": "scripted", "messages": [{"role": "user", "content": "l"}], "tools": [tool]}
            refused = httpx.post(f"{none.url}/v1/chat/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
        finally:
            none.stop()
    finally:
        shim.stop()


def test_salts_part_the_prefix_cache_and_the_admin_key_empties_it(triton: str, tmp_path: Path) -> None:
    shim = Shim(tmp_path, "--triton", triton, "--api-key", "k", "--admin-key", "boss")
    prompt = "Salt and pepper. " * 20
    try:
        client = openai.OpenAI(base_url=f"{shim.url}/v1", api_key="k", max_retries=0)

        def cached(salt: str | None) -> int:
            fields = {"extra_body": {"cache_salt": salt}}
            made = client.completions.create(model="demo", prompt=prompt, max_tokens=1, **fields)
            return made.usage.prompt_tokens_details.cached_tokens

        first, other, again, plain = (cached(salt) for salt in ("a", "b", "a", None))
        assert (first, other, plain) == (0, 0, 0)
        assert again > 0
        with pytest.raises(openai.BadRequestError, match="cache_salt"):
            cached("")
        ask = functools.partial(httpx.post, f"{shim.url}/reset_prefix_cache")
        assert [ask(headers={"Authorization": f"Bearer {key}"}).status_code for key in ("k", "x")] == [401, 401]
        answer = ask(headers={"Authorization": "Bearer boss"}, params={"model": "demo"})
        assert answer.json() == {"status": "ok", "replicas": {triton.rpartition(":")[0]: {"demo": "ok"}}}
        assert cached("a") == 0
        everything = ask(headers={"Authorization": "Bearer boss"})
        assert set(everything.json()["replicas"][triton.rpartition(":")[0]]) == {"demo", "scripted"}
        assert ask(headers={"Authorization": "Bearer boss"}, params={"model": "none"}).status_code == 404
    finally:
        shim.stop()


@pytest.mark.slow  # any form is chosen by its flag, and each is read in tests of its own
def test_a_form_with_markers_around_calls_is_asked_for_and_read(triton: str, tmp_path: Path) -> None:
    shim = Shim(tmp_path, "--triton", triton, "--tool-parser", "kimi-k2")
    parameters = {"type": "object", "properties": {"zone": {"const": "UTC"}}, "required": ["zone"]}
    parameters["additionalProperties"] = False
    tool = {"type": "function", "function": {"name": "get_time", "parameters": parameters}}
    named = {"type": "function", "function": {"name": "get_time"}}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    try:
        client = openai.OpenAI(base_url=f"{shim.url}/v1", api_key="none", max_retries=0)
        ask = functools.partial(client.chat.completions.create, model="scripted", temperature=0, extra_body=off)
        for choice in (named, "required"):
            fields = {"tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
            (answer,) = ask(messages=[{"role": "user", "content": "h"}], **fields).choices
            (call,) = answer.message.tool_calls
            assert call.function.name == "get_time"
            assert json.loads(call.function.arguments) == {"zone": "UTC"}
    finally:
        shim.stop()


def workers_of(shim: Shim) -> list[psutil.Process]:
    """Its processes that serve; beside them stands one that keeps count of resources."""
    children = psutil.Process(shim.process.pid).children()
    return [child for child in children if "spawn_main" in Path(f"/proc/{child.pid}/cmdline").read_text()]


def connected(shim: Shim, timeout: float) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(shim.host.rsplit(":", 1)[1])), timeout=timeout)


def test_connections_wait_for_workers_that_take_the_place_of_dead_ones(triton: str, tmp_path: Path) -> None:
    """All are killed as soon as they answer. Whoever connects when the next are started, and import what they need, is
    answered by them."""
    shim = Shim(tmp_path, "--triton", triton, "--workers", "2")
    try:
        workers = workers_of(shim)
        assert len(workers) == 2
        for worker in workers:
            worker.kill()
        started = shim.log().count("Started server process")
        while shim.log().count("starting another") < 2:
            time.sleep(0.001)
        with connected(shim, timeout=60) as waiting:
            assert shim.log().count("Started server process") == started
            waiting.sendall(VERSION)
            assert waiting.recv(12) == b"HTTP/1.1 200"
    finally:
        shim.stop()


def test_no_connection_waits_for_a_new_worker_while_another_serves(triton: str, tmp_path: Path) -> None:
    """One of two is killed, and the one that takes its place stands still before it is ready. All are answered by the
    other; when that is killed too, whoever connects waits for the new one."""
    shim = Shim(tmp_path, "--triton", triton, "--workers", "2")

    try:
        dead, other = workers_of(shim)
        dead.kill()
        while not (fresh := {worker for worker in workers_of(shim) if worker.pid not in (dead.pid, other.pid)}):
            time.sleep(0.001)
        (new,) = fresh
        new.suspend()
        for _ in range(24):
            with connected(shim, timeout=20) as asked:
                asked.sendall(VERSION)
                assert asked.recv(12) == b"HTTP/1.1 200"
        other.kill()
        while shim.log().count("starting another") < 2:
            time.sleep(0.001)
        with connected(shim, timeout=20) as waiting:
            waiting.sendall(VERSION)
            new.resume()
            assert waiting.recv(12) == b"HTTP/1.1 200"
    finally:
        shim.stop()


def test_workers_share_the_port_and_their_counts_and_end_in_good_order(triton: str, tmp_path: Path) -> None:
    shim = Shim(tmp_path, "--triton", triton, "--workers", "2")
    try:
        end = time.monotonic() + 30
        while shim.log().count("startup complete") < 2:
            assert time.monotonic() < end, shim.log()
            time.sleep(0.1)
        threads = [
            threading.Thread(
                target=httpx.post, args=(f"{shim.url}/v1/completions",), kwargs={"json": BODY, "timeout": 30}
            )
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        workers = psutil.Process(shim.process.pid).children()
        held = [httpx.Client(base_url=shim.url) for _ in range(32)]  # a connection each, which stays open
        for client in held:
            assert client.get("/version").status_code == 200
        port = int(shim.host.split(":")[1])
        shares = [
            sum(c.laddr.port == port and c.status == psutil.CONN_ESTABLISHED for c in worker.net_connections("tcp"))
            for worker in workers
        ]
        shares = [share for share in shares if share]  # multiprocessing's resource tracker has none
        assert len(shares) == 2
        assert min(shares) >= 4  # dealt out by the kernel: 16 each, more or less
        for client in held:
            client.close()
        page = httpx.get(f"{shim.url}/metrics").text
        assert 'nereid_openai_requests_total{path="/v1/completions",status="200"} 6.0' in page
    finally:
        assert shim.stop() == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--triton", "nowhere"], "HOST:GRPC_PORT"),
        (["--triton", "localhost:80010"], "80010"),
        (["--request-timeout", "inf"], "request_timeout_s"),
        (["--workers", "2", "--tls-certificate", __file__, "--tls-key", __file__], "not a certificate and its key"),
        (["--tls-key", "missing.pem"], "missing.pem"),
        (["--tool-parser", "xml"], "tool_parser"),
        (["--workers", "0"], "workers"),
        (["--api-key-file", "missing"], "missing"),
        (["--log-level", "loud"], "loud"),
    ],
)
def test_flags_that_cannot_be_used_end_it_with_a_sentence(flags: list[str], says: str) -> None:
    ended = subprocess.run([sys.executable, "-m", "clients.openai", *flags], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr
