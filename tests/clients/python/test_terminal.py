"""`nereid chat`, `bench` and `top` against the real server."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput
from rich.console import Console
from typer.testing import CliRunner

from clients.python import Client, SamplingParams
from clients.python.chat import COMMANDS, Chat
from clients.python.cli import app
from clients.python.line_editor import editor
from clients.python.local_server import LocalServer
from engine import env

pytestmark = [pytest.mark.xdist_group("server"), pytest.mark.timeout(300)]

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


class Terminal:
    """A chat whose user types the given lines."""

    def __init__(self, client: Client, *lines: str) -> None:
        self.out = io.StringIO()
        self.chat = Chat(client, PARAMS, Console(file=self.out, width=200, no_color=True))
        typed: Iterator[str] = iter(lines)

        def read() -> str:
            line = next(typed, None)
            if line is None:
                raise EOFError
            return line

        self.chat.run(read)

    @property
    def shown(self) -> str:
        return self.out.getvalue()


class Person:
    """Types into `nereid chat` at a terminal and reads what it shows."""

    def __init__(self, url: str, cache: Path) -> None:
        self._keyboard, terminal = pty.openpty()
        command = [sys.executable, "-m", "clients.python.cli", "chat", "--url", url]
        command += ["--max-tokens", "8", "--temperature", "0"]
        variables = {**os.environ, env.CACHE_DIR: str(cache), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=variables)
        os.close(terminal)

    def types(self, keys: str, until: str) -> None:
        """Go on when `until` stands in what was shown since, a pattern."""
        os.write(self._keyboard, keys.encode())
        shown = b""
        while not re.search(until.encode(), re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown), re.DOTALL):
            shown += os.read(self._keyboard, 65536)

    def leaves(self) -> int:
        os.write(self._keyboard, b"\x04")
        try:
            while os.read(self._keyboard, 65536):
                pass
        except OSError:  # the terminal's other end is closed
            pass
        os.close(self._keyboard)
        return self.process.wait()


def test_a_conversation_remembers(client: Client) -> None:
    terminal = Terminal(client, "Hello", "And then?", "/history")
    roles = [message["role"] for message in terminal.chat.history]
    assert roles == ["user", "assistant", "user", "assistant"]
    expected = client.chat(terminal.chat.history[:3], PARAMS).text
    assert terminal.chat.history[3]["content"] == expected
    assert "8 tokens; max_tokens reached" in terminal.shown
    assert "user: And then?" in terminal.shown


def test_commands_change_what_is_sent(client: Client) -> None:
    terminal = Terminal(
        client, "/system Be brief.", '/params max_tokens=3 stop=["x", "y z"] top_k=5', "Hello", "/retry"
    )
    assert terminal.chat.system == "Be brief."
    params = terminal.chat.params
    assert (params.max_tokens, params.stop, params.top_k) == (3, ("x", "y z"), 5)
    assert len(terminal.chat.history) == 2
    messages = [{"role": "system", "content": "Be brief."}, terminal.chat.history[0]]
    assert terminal.chat.history[1]["content"] == client.chat(messages, terminal.chat.params).text
    assert Terminal(client, "Hello", "/clear", "/quit", "never read").chat.history == []


def test_a_conversation_is_saved_and_nothing_is_written_over(client: Client, tmp_path: Path) -> None:
    text, data, other = tmp_path / "a.md", tmp_path / "a.json", tmp_path / "other"
    other.write_text("mine")
    lines = ("/system Be brief.", "Hello", f"/save {text}", f"/save {data}", "And?", f"/save {data}", f"/save {other}")
    terminal = Terminal(client, *lines, "/save", f"/save {tmp_path}/none/x")
    kept = json.loads(data.read_text())
    assert kept["model"] == "demo"
    assert kept["messages"] == [{"role": "system", "content": "Be brief."}, *terminal.chat.history]
    assert text.read_text().startswith("## system\n\nBe brief.\n\n## user\n\nHello\n\n## assistant\n\n")
    assert other.read_text() == "mine"
    for sentence in ("exists already", "Name a file", "cannot be written: No such file", "4 messages are in"):
        assert sentence in terminal.shown


def test_a_typed_line_is_edited_has_several_lines_and_is_found_again(tmp_path: Path) -> None:
    left, up, alt_enter = "\x1b[D", "\x1b[A", "\x1b\r"
    file = tmp_path / "cache" / "history"
    with create_pipe_input() as keys:
        read = editor(file, COMMANDS, keys, DummyOutput())
        for typed, got in (
            (f"Helo{left}l\r", "Hello"),
            (f"one{alt_enter}two\r", "one\ntwo"),
            ("\x1b[200~pasted\nlines\x1b[201~\r", "pasted\nlines"),
            ("not this\x03but this\r", "but this"),
        ):
            keys.send_text(typed)
            assert read() == got
        for typed, raised in (("\x04", EOFError), ("\x03", KeyboardInterrupt)):
            keys.send_text(typed)
            with pytest.raises(raised):
                read()
    assert file.stat().st_mode & 0o777 == 0o600
    with create_pipe_input() as keys:  # another session
        keys.send_text(f"Hel{up}\r")
        assert editor(file, COMMANDS, keys, DummyOutput())() == "Hello"
    with create_pipe_input() as keys:
        keys.send_text("kept nowhere\r")
        assert editor(Path("/proc/none/history"), COMMANDS, keys, DummyOutput())() == "kept nowhere"


def test_a_person_at_a_terminal_edits_and_saves(server: LocalServer, tmp_path: Path) -> None:
    left, up, alt_enter, answered = "\x1b[D", "\x1b[A", "\x1b\r", "tokens/s.*> "
    person, file = Person(server.grpc, tmp_path / "cache"), tmp_path / "a.json"
    try:
        person.types("", "> ")
        person.types(f"Helo{left}l\r", answered)
        person.types(f"{up} there\r", answered)
        person.types(f"one{alt_enter}two\r", answered)
        person.types(f"/save {file}\r", "6 messages are in.*> ")
        assert person.leaves() == 0
    finally:
        person.process.kill()
    typed = [message["content"] for message in json.loads(file.read_text())["messages"][::2]]
    assert typed == ["Hello", "Hello there", "one\ntwo"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/params temperature=hot", "temperature"),
        ("/params top_p=7", "top_p"),
        ("/params colour=1", "colour"),
        ("/params loud", "write NAME=VALUE"),
        ("/params [/loud]", "[/loud]: write NAME=VALUE"),
        ("/dance", "no command /dance"),
        ("/retry", "no message to answer"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(client: Client, line: str, says: str) -> None:
    terminal = Terminal(client, line)
    assert says in terminal.shown
    assert terminal.chat.params == PARAMS


def test_a_refused_message_is_taken_back(client: Client) -> None:
    terminal = Terminal(client, "word " * 9000)
    assert "error:" in terminal.shown
    assert terminal.chat.history == []


def test_bench_prints_a_row_for_each_number_of_streams(server: LocalServer) -> None:
    options = ["--streams", "1", "--streams", "3", "--requests", "1", "--input", "8", "--output", "4"]
    result = CliRunner().invoke(app, ["bench", "--url", server.grpc, *options], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    rows = [line.replace("│", " ").split() for line in result.output.splitlines() if "8/4" in line]
    assert [row[:3] for row in rows] == [["1", "1", "8/4"], ["3", "3", "8/4"]]


def test_top_shows_the_models_and_what_they_did(server: LocalServer, client: Client) -> None:
    client.complete("Hello", PARAMS)
    url = f"http://{server.metrics}/metrics"
    result = CliRunner().invoke(app, ["top", "--url", url, "--count", "1", "--interval", "0.6"], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "demo" in result.output
    assert "running" in result.output


@pytest.mark.parametrize(
    "command", [["chat", "--temperature", "-1"], ["chat", "--max-tokens", "0"], ["bench", "--streams", "0"]]
)
def test_an_option_out_of_range_is_refused_at_once(command: list[str]) -> None:
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert command[1] in result.output


def test_a_page_that_is_not_of_metrics_is_told_in_a_sentence(server: LocalServer) -> None:
    result = CliRunner().invoke(app, ["top", "--url", f"http://{server.http}/v2", "--count", "1"])
    assert result.exit_code == 1
    assert "no metrics at" in result.output


@pytest.mark.parametrize("command", [["bench", "--url", "127.0.0.1:9"], ["top", "--url", "http://127.0.0.1:9/metrics"]])
def test_without_a_server_a_sentence_says_so(command: list[str]) -> None:
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "nereid serve" in result.output
