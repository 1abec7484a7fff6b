"""Flags of the shim that name what is not there, or ask for what cannot be."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from clients.openai import workers
from clients.openai.config import ShimConfig
from clients.python.cli import app


@pytest.fixture(autouse=True)
def nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flag that is taken fails the test, and does not serve on."""

    def listen(_: ShimConfig) -> None:
        pytest.fail("the flags were taken")

    monkeypatch.setattr(workers, "_listen", listen)


def said(*flags: str) -> str:
    """Why the command ends before it serves."""
    result = CliRunner().invoke(app, ["openai", *flags])
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert "Errno" not in result.output
    return result.output


@pytest.mark.parametrize("flag", ["--tls-certificate", "--tls-key", "--tls-client-ca"])
@pytest.mark.parametrize("held", ["nothing", "folder", "pipe"])
def test_a_file_for_tls_that_cannot_be_read_is_named_with_its_flag(flag: str, held: str, tmp_path: Path) -> None:
    file = tmp_path / "a.pem"
    if held == "folder":
        file.mkdir()
    elif held == "pipe":
        os.mkfifo(file)
    why = "No such file or directory" if held == "nothing" else "it is no regular file"
    assert f"{flag} {file} cannot be read ({why}): give a PEM file that is there" in said(flag, str(file))


def test_what_is_no_certificate_is_named_with_its_flags(tmp_path: Path) -> None:
    file = tmp_path / "a.pem"
    file.touch()
    sentence = f"--tls-certificate {file} and --tls-key {file} are not a certificate and its key in PEM form"
    assert sentence in said("--tls-certificate", str(file), "--tls-key", str(file))


def test_a_key_with_a_passphrase_is_not_asked_for(tmp_path: Path) -> None:
    certificate, key = tmp_path / "a.pem", tmp_path / "key.pem"
    words = f"req -x509 -newkey rsa:2048 -passout pass:secret -subj /CN=x -keyout {key} -out {certificate}"
    subprocess.run(["openssl", *words.split()], check=True, capture_output=True)
    assert "without a passphrase" in said("--tls-certificate", str(certificate), "--tls-key", str(key))


def test_no_address_is_no_address_of_all() -> None:
    assert "--host is empty: give an address, 0.0.0.0 for every one" in said("--host", "")


@pytest.mark.parametrize(
    ("held", "sentence"),
    [
        (None, "cannot be read (No such file or directory): give a file with one key a line"),
        (b"\xff", "is no text in UTF-8: give a file with one key a line"),
        (b"\n", "holds no key: give a file with one key a line, or leave the flag out"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used_is_named_with_its_flag(
    held: bytes | None, sentence: str, tmp_path: Path
) -> None:
    if held is not None:
        (tmp_path / "keys").write_bytes(held)
    assert f"--api-key-file {tmp_path}/keys {sentence}" in said("--api-key-file", f"{tmp_path}/keys")


def test_a_log_that_cannot_be_written_is_named_with_its_flag(tmp_path: Path) -> None:
    lost = tmp_path / "lost" / "log"
    assert f"--request-log {lost} cannot be written (No such file" in said("--request-log", str(lost))
    assert f"--request-log {tmp_path} cannot be written (Is a directory)" in said("--request-log", str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    assert "pipe cannot be written" in said("--request-log", str(tmp_path / "pipe"))


def test_an_address_that_nothing_can_listen_at_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        sentence = f"nothing can listen at --host 127.0.0.1 and --port {port} (Address already in use): give"
        assert sentence in said("--port", str(port))
    assert "--host a..b and --port" in said("--host", "a..b")


@pytest.mark.parametrize(
    "origin",
    [
        "junk",
        "",
        "chat.example",
        "https://",
        "https://chat.example/",
        "https://chat.example/page",
        "https://Chat.example",
        "https://*.example",
        "https://user@chat.example",
        "https://chat.example:443",
        "http://chat.example:80",
        "http://chat.example:08080",
    ],
)
def test_what_no_browser_has_as_its_origin_is_refused(origin: str) -> None:
    assert f"--cors-origin {origin!r} is no origin that a browser has: give *, null or" in said("--cors-origin", origin)


@pytest.mark.parametrize(
    "origin",
    [
        "*",
        "null",
        "https://chat.example",
        "http://localhost:3000",
        "http://[::1]:8080",
        "https://chat.example:80",
        "app://obsidian.md",
        "chrome-extension://aapbdbdomjkkjkaonfhkkikfgjllcleb",
    ],
)
def test_an_origin_as_browsers_write_it_is_taken(origin: str) -> None:
    assert ShimConfig(cors_origins=(origin,)).cors_origins == (origin,)
