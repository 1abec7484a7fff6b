"""A field that chat refuses has the name that the API of the request's path has for it."""

from __future__ import annotations

import pytest

from clients.openai.errors import ApiError
from clients.openai.field_names import renamed


@pytest.mark.parametrize(
    ("path", "param", "message", "told"),
    [
        ("/v1/responses", "max_completion_tokens", "`max_completion_tokens` is too large", "max_output_tokens"),
        (
            "/v1/responses",
            "response_format.json_schema",
            "Invalid value for 'response_format.json_schema'",
            "text.format",
        ),
        ("/v1/messages", "stop[1]", "Invalid value for 'stop[1]': no", "stop_sequences[1]"),
        ("/v1/messages", "user", "user is too long", "metadata.user_id"),
    ],
)
def test_param_and_message_have_the_apis_name(path: str, param: str, message: str, told: str) -> None:
    error = renamed(ApiError(400, message, param=param, code="c"), path)
    assert (error.param or "").startswith(told)
    assert told in error.message
    assert param.split(".")[0] not in error.message.replace(told, "")
    assert error.code == "c"


def test_words_that_are_no_field_stay() -> None:
    sentence = "the user may not stop here"
    assert renamed(ApiError(400, sentence, param="user"), "/v1/messages").message == sentence


def test_chats_own_names_stay() -> None:
    error = ApiError(400, "`stop` is wrong", param="stop")
    assert renamed(error, "/v1/chat/completions") is error
    assert renamed(ApiError(400, "no", param=None), "/v1/messages").param is None
