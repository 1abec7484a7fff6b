"""What the shim answers before a model is asked: keys, sizes, paths, CORS. The app is real, Triton is absent."""

from __future__ import annotations

import asyncio
import gzip
import logging
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from clients.openai import gate
from clients.openai.app import create_app
from clients.openai.config import ShimConfig

Ask = Callable[..., httpx.Response]
BODY = {"model": "m", "prompt": "x"}


def asker(**settings: Any) -> Ask:
    app = create_app(ShimConfig(**settings))

    def ask(method: str, path: str, **options: Any) -> httpx.Response:
        async def run() -> httpx.Response:
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://shim") as client:
                return await client.request(method, path, **options)

        return asyncio.run(run())

    return ask


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


def test_what_needs_an_admin_key_is_refused_without_one() -> None:
    refused = asker(api_keys=("k",))("POST", "/reset_prefix_cache", headers={"Authorization": "Bearer k"})
    assert (refused.status_code, error_of(refused)["code"]) == (403, "no_admin_key")
    ask = asker(admin_keys=("boss",))
    assert ask("POST", "/reset_prefix_cache").status_code == 401
    assert ask("POST", "/reset_prefix_cache", headers={"Authorization": "Bearer boss"}).status_code == 503
    assert ask("POST", "/v1/completions", json=BODY).status_code == 503  # no tritonserver: it needs no key


def test_keys_are_asked_for_where_work_is_done() -> None:
    ask = asker(api_keys=("first", "second", "schlüssel"))
    for headers in (
        {},
        {"Authorization": "Bearer third"},
        {"Authorization": "Basic first"},
        {"Authorization": "Bearer"},
    ):
        response = ask("POST", "/v1/completions", json=BODY, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert error_of(response)["type"] == "authentication_error"
    for key in ("first", "second", "schlüssel"):
        headers = {b"Authorization": f"Bearer {key}".encode()}
        assert ask("POST", "/v1/completions", json=BODY, headers=headers).status_code == 503
    for path in ("/v1/models", "/stats"):
        assert ask("GET", path).status_code == 401
    for path in ("/version", "/metrics", "/", "/docs", "/openapi.json"):
        assert ask("GET", path).status_code == 200


def test_without_a_server_the_answer_is_503_with_retry_after() -> None:
    ask = asker()
    for response in (ask("POST", "/v1/completions", json=BODY), ask("GET", "/health"), ask("GET", "/health/generate")):
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert error_of(response)["code"] == "backend_unavailable"


def test_a_large_body_is_413_whether_its_length_is_told_or_not() -> None:
    ask = asker(max_body_bytes=1024)
    told = ask("POST", "/v1/completions", json={"model": "m", "prompt": "x" * 2000})

    async def chunks() -> Any:
        for _ in range(4):
            yield b"x" * 512

    untold = ask("POST", "/v1/completions", content=chunks())
    for response in (told, untold):
        assert response.status_code == 413
        assert "1024 bytes" in error_of(response)["message"]
        assert error_of(response)["code"] == "content_too_large"  # NVIDIA's frontend's code


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"stream_options": {"include_usage": True}}, "`stream_options` can only be used when `stream` is True"),
        ({"top_logprobs": 0}, "`top_logprobs` can only be used when `logprobs` is True"),
        ({"top_logprobs": 25, "logprobs": True}, "less than or equal to 20"),
    ],
)
def test_sentences_that_nvidias_frontend_tests_look_for(fields: dict[str, Any], sentence: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    response = asker()("POST", "/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert sentence in error_of(response)["message"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not valid JSON"),
        (b"", "missing"),
        (b"[]", "JSON object"),
        (b'"x"', "JSON object"),
        (b"\xff\xfe", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"model": "m", "prompt": "\\ud800"}', "JSON"),
        (b'{"model": "m"}', "prompt"),
    ],
)
def test_broken_bodies_are_400_in_the_error_shape(content: bytes, says: str) -> None:
    response = asker()("POST", "/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert says in error_of(response)["message"]


def test_a_body_that_is_encoded_is_refused_by_that_name() -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    response = asker()("POST", "/v1/completions", content=gzip.compress(b"{}"), headers=headers)
    assert response.status_code == 415
    assert "(gzip)" in error_of(response)["message"]
    headers["Content-Encoding"] = "identity"
    assert asker()("POST", "/v1/completions", json=BODY, headers=headers).status_code == 503  # no tritonserver


def test_parameters_of_the_target_are_unknown_fields() -> None:
    response = asker()("POST", "/v1/completions?beta=true&stream=1", json=BODY)
    assert response.headers["x-ignored-fields"] == "?stream"
    refused = asker(strict_fields=True)("POST", "/v1/completions?stream=1", json=BODY)
    assert refused.status_code == 400
    assert error_of(refused)["param"] == "?stream"


def test_unknown_paths_and_methods_have_the_error_shape() -> None:
    ask = asker()
    assert ask("HEAD", "/version").status_code == 200  # as GET; load balancers ask so
    for method, path, status in (("GET", "/v1/what", 404), ("GET", "/v1/completions", 405), ("GET", "/web/x", 404)):
        response = ask(method, path)
        assert response.status_code == status
        assert path in error_of(response)["message"]


def test_cors_is_off_unless_an_origin_is_named() -> None:
    origin = {"Origin": "https://a.example"}
    assert "access-control-allow-origin" not in asker()("GET", "/version", headers=origin).headers
    ask = asker(cors_origins=("https://a.example",), api_keys=("k",))
    assert ask("GET", "/version", headers=origin).headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in ask("GET", "/version", headers={"Origin": "https://b.example"}).headers
    asked = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    asked["Access-Control-Request-Headers"] += ",x-stainless-lang"  # the SDK for JavaScript tells where it runs
    assert ask("OPTIONS", "/v1/completions", headers=asked).status_code == 200
    assert ask("GET", "/v1/models", headers=origin).headers["access-control-allow-origin"] == "https://a.example"


def test_the_request_id_comes_back_unless_it_could_break_a_log_line() -> None:
    ask = asker()
    assert ask("GET", "/version", headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made = ask("GET", "/version", headers={"X-Request-Id": "two words"}).headers["x-request-id"]
    assert len(made) == 32


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_body_may_bring_the_request_id_and_the_header_wins(path: str) -> None:
    ask = asker()
    body = {**BODY, "messages": [{"role": "user", "content": "a"}]}
    named = {**body, "request_id": "mine-1"}
    assert ask("POST", path, json=named).headers["x-request-id"] == "mine-1"
    assert ask("POST", path, json=named, headers={"X-Request-Id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert len(ask("POST", path, json={**body, "request_id": None}).headers["x-request-id"]) == 32
    for wrong in ("two words", "line\n", "", "x" * 129):
        refused = ask("POST", path, json={**body, "request_id": wrong})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "request_id")


def test_a_path_cannot_break_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nereid.openai.access")
    asker()("GET", "/a%0Ab")
    (line,) = [record.getMessage() for record in caplog.records if record.name == "nereid.openai.access"]
    assert line.startswith("GET /a%0Ab 404 ")


def test_the_pages_load_nothing_from_elsewhere() -> None:
    ask = asker()
    for path in ("/", "/docs"):
        response = ask("GET", path)
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "http://" not in response.text
        assert "https://" not in response.text
    off = asker(web=False)
    assert off("GET", "/").status_code == 404


def test_paths_that_clients_make_up_are_counted_as_one() -> None:
    ask = asker(api_keys=("first",))
    for path in ("/made/up", "/web/made-up/", "/v1/models/made-up"):
        ask("GET", path)
    ask("POST", "/v1/completions", json=BODY)
    page = ask("GET", "/metrics").text
    assert "made" not in page
    assert 'nereid_openai_requests_total{path="unknown",status="401"} 2.0' in page
    assert 'nereid_openai_requests_total{path="/v1/completions",status="401"} 1.0' in page


def test_every_answer_is_counted() -> None:
    ask = asker()
    ask("POST", "/v1/completions", json=BODY)
    page = ask("GET", "/metrics").text
    assert 'nereid_openai_requests_total{path="/v1/completions",status="503"} 1.0' in page


def test_a_body_of_many_mistakes_is_answered_with_their_number() -> None:
    response = asker()("POST", "/v1/completions", json={**BODY, "logit_bias": {f"k{i}": 0 for i in range(1020)}})
    assert response.status_code == 400
    assert error_of(response)["message"] == "The request body holds 1020 mistakes; see /docs."


def test_an_unknown_field_is_refused_or_named_in_a_header() -> None:
    body = {**BODY, "nonsense": 1, "y\r\nX-Evil": 2}
    named = asker()("POST", "/v1/completions", json=body)
    assert (named.status_code, named.headers["x-ignored-fields"]) == (503, "nonsense, y%0D%0AX-Evil")
    refused = asker(strict_fields=True)("POST", "/v1/completions", json=body)
    assert (refused.status_code, error_of(refused)["code"]) == (400, "unknown_parameter")
    assert error_of(refused)["param"] == "nonsense"


def test_names_that_nothing_here_has_come_back_cut() -> None:
    response = asker()("GET", "/" + "x" * 50_000)
    assert response.status_code == 404
    assert len(response.content) < 2200


@pytest.mark.parametrize(
    ("path", "fields", "about"),
    [
        ("responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "n" * 65}}}, "name"),
        ("messages", {"max_tokens": 1, "output_config": {"effort": {"a": []}}}, "output_config.effort"),
        ("messages", {"max_tokens": 1, "output_config": {"format": []}}, "output_config.format"),
        ("messages/count_tokens", {"output_config": {"format": 5}}, "output_config.format"),
    ],
)
def test_what_another_api_takes_and_chat_does_not_is_a_400(path: str, fields: dict[str, Any], about: str) -> None:
    """It was a 500: the translated request was nobody's to check."""
    messages = {"messages": [{"role": "user", "content": "x"}]} if path.startswith("messages") else {}
    response = asker()("POST", f"/v1/{path}", json={"model": "m", **messages, **fields})
    assert response.status_code == 400
    assert about in response.json()["error"]["message"]


def test_an_error_that_nobody_foresaw_leaves_the_connection_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised on, it has the server close a connection whose next request may be somebody else's."""

    async def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("clients.openai.app.complete", fail)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(ShimConfig()), raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://shim") as client:
            return await client.post("/v1/completions", json=BODY)

    response = asyncio.run(ask())
    assert response.status_code == 500
    assert error_of(response)["code"] == "internal"


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_memory_of_a_large_body_goes_back() -> None:
    """Of a body of 14 MB a worker kept 30 MB."""
    body = b'{"model":"m","prompt":[' + b",".join([b"100000"] * 2_000_000) + b"]}"

    async def run() -> tuple[int, int]:
        transport = httpx.ASGITransport(create_app(ShimConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://shim") as client:
            sizes = []
            for data in (b'{"model":"m","prompt":"x"}', body):
                headers = {"Content-Type": "application/json"}
                response = await client.post("/v1/completions", content=data, headers=headers)
                assert response.status_code == 503, response.text  # no tritonserver
                await asyncio.sleep(3 * gate._TRIM_AFTER_S)
                sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
        return sizes[0], sizes[1]

    before, after = asyncio.run(run())
    assert after < before + (15 << 20)
