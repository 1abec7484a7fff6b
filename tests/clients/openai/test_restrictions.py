"""Groups of endpoints that need a header of their own. The app is real, Triton is absent."""

from __future__ import annotations

import pytest

from clients.openai.config import ShimConfig
from clients.openai.restrictions import Restriction
from tests.clients.openai.test_gate import BODY, asker, error_of

ADMIN = Restriction.parse("inference,model-repository:admin-key=admin=value")


def test_a_restricted_group_is_for_requests_with_its_header() -> None:
    ask = asker(restrictions=(ADMIN,))
    for method, path in (("POST", "/v1/completions"), ("POST", "/v1/responses"), ("GET", "/v1/models/m")):
        for headers in ({}, {"admin-key": "wrong"}, {"Authorization": "Bearer admin=value"}):
            refused = ask(method, path, json=BODY, headers=headers)
            assert (refused.status_code, error_of(refused)["type"]) == (401, "authentication_error")
        assert ask(method, path, json=BODY, headers={"Admin-Key": "admin=value"}).status_code != 401
    for path in ("/health/ready", "/metrics", "/version", "/"):
        assert ask("GET", path).status_code != 401


def test_its_header_stands_for_a_key_and_elsewhere_a_key_is_needed() -> None:
    ask = asker(restrictions=(Restriction.parse("model-repository:x-models=v"),), api_keys=("k",))
    sent = {"x-models": "v"}
    assert ask("GET", "/v1/models", headers=sent).status_code == 200
    assert ask("GET", "/v1/models", headers={"Authorization": "Bearer k"}).status_code == 401
    assert ask("POST", "/v1/completions", json=BODY, headers=sent).status_code == 401
    assert (
        ask("POST", "/v1/models/m/load", headers=sent).status_code == 503
    )  # as with the admin key: no server is there
    refused = ask("POST", "/reset_prefix_cache", headers=sent)
    assert error_of(refused)["code"] == "no_admin_key"


@pytest.mark.parametrize(
    ("text", "path"), [("metrics:k=v", "/metrics"), ("health:k=v", "/health"), ("health:k=v", "/ping")]
)
def test_what_is_open_can_be_restricted(text: str, path: str) -> None:
    ask = asker(restrictions=(Restriction.parse(text),))
    assert ask("GET", path).status_code == 401
    assert ask("GET", path, headers={"k": "v"}).status_code in (200, 503)


@pytest.mark.parametrize("text", ["inference", "inference:key", "inference:=v", "inference:key=", "inference:a b=v"])
def test_a_wrong_flag_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"GROUP.*:HEADER=VALUE"):
        Restriction.parse(text)


def test_unknown_and_repeated_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="Unknown API 'x'"):
        Restriction.parse("inference,x:k=v")
    twice = "restricted api 'inference' can not be specified in multiple config groups"
    for groups in (("inference,inference:k=v",), ("inference:k=v", "inference:k2=v2")):
        with pytest.raises(ValueError, match=twice):
            ShimConfig(restrictions=tuple(Restriction.parse(text) for text in groups))
