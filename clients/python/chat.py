"""`nereid chat`: a conversation in the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.markup import escape

from clients.python.sync import Client
from clients.python.timing import Timing
from clients.python.wire import Message, ServerError
from engine.terminal import Console
from engine.types import SamplingParams

HELP = """\
/system TEXT       set the system message (without TEXT: remove it)
/params            show the sampling parameters
/params NAME=VALUE set some of them, e.g. /params temperature=0.2 stop=["a", "b"]
/history           show the conversation
/clear             forget the conversation
/retry             answer the last message again
/save FILE         write the conversation: FILE.md as text, any other as JSON with the messages of the API
/help, /quit

Enter sends; Alt-Enter makes a further line; the arrow keys and Ctrl-R find what you typed before.
Ctrl-C ends an answer, takes back a line that you type, and leaves on an empty line."""
COMMANDS = ("/system", "/params", "/history", "/clear", "/retry", "/save", "/help", "/quit")


class Chat:
    """The conversation and its commands; knows nothing of terminals but a console to print on."""

    def __init__(self, client: Client, params: SamplingParams, console: Console, system: str | None = None) -> None:
        self._client = client
        self._console = console
        self.params = params
        self.system = system
        self.history: list[Message] = []
        self._saved: set[Path] = set()

    def run(self, read: Callable[[], str]) -> None:
        """Answer lines from `read` until it raises EOFError or the user quits."""
        self._console.print(f"Chatting with {self._client.model}. /help lists the commands; Ctrl-C ends an answer.")
        while True:
            try:
                line = read().strip()
            except (EOFError, KeyboardInterrupt):
                self._console.print()
                return
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self.command(line)
            elif line:
                self.history.append({"role": "user", "content": line})
                self.answer()

    def command(self, line: str) -> None:
        """Obey a line that starts with a slash."""
        name, _, rest = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._console.print(HELP, highlight=False, markup=False),
            "/system": self._set_system,
            "/params": self._set_params,
            "/history": lambda _: self._show_history(),
            "/clear": lambda _: self.history.clear(),
            "/retry": lambda _: self._retry(),
            "/save": self._save,
        }
        command = commands.get(name)
        if command is None:
            self._console.print(f"There is no command {name}. /help lists them.", markup=False)
        else:
            command(rest.strip())

    def answer(self) -> None:
        """Stream the answer to the history's last message; Ctrl-C ends it and keeps what came."""
        timing = Timing()
        text = ""
        note = ""
        chunks = self._client.stream_chat(self._messages(), self.params)
        try:
            for chunk in chunks:
                timing.token(len(chunk.token_ids))
                text += chunk.text
                self._console.print(chunk.text, end="", markup=False, highlight=False)
                if chunk.finish_reason == "length":
                    note = "; max_tokens reached"
        except KeyboardInterrupt:
            note = "; cancelled"
        except ServerError as error:
            self.history.pop()
            self._complain(error)
            return
        finally:
            chunks.close()  # type: ignore[attr-defined]  # a generator; this is what cancels the request
        self.history.append({"role": "assistant", "content": text})
        self._console.print(f"\n[dim]{timing}{note}[/]", highlight=False)

    def _messages(self) -> list[Message]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.history]

    def _set_system(self, text: str) -> None:
        self.system = text or None

    def _set_params(self, text: str) -> None:
        try:
            changes = _assignments(text)
            if changes:
                values = {**msgspec.to_builtins(self.params), **changes}
                self.params = msgspec.convert(values, SamplingParams)
        except ValueError as error:
            self._complain(error)
            return
        self._console.print_json(msgspec.json.encode(self.params).decode() if self.params else "{}")

    def _complain(self, error: Exception) -> None:
        self._console.print(f"[red]error:[/] {escape(str(error))}", highlight=False)

    def _show_history(self) -> None:
        for message in self._messages():
            self._console.print(f"[bold]{message['role']}[/]: ", end="")
            self._console.print(message["content"], markup=False, highlight=False)

    def _save(self, name: str) -> None:
        """A file that this conversation has not written before is not written over."""
        if not name:
            self._console.print("Name a file: /save FILE")
            return
        file = Path(name).expanduser()
        try:
            with file.open("w" if file.resolve() in self._saved else "x", encoding="utf-8") as out:
                out.write(self._as_markdown() if file.suffix == ".md" else self._as_json())
        except FileExistsError:
            self._console.print(f"{file} exists already: name another one.", markup=False, highlight=False)
        except OSError as error:
            self._console.print(f"{file} cannot be written: {error.strerror}", markup=False, highlight=False)
        else:
            self._saved.add(file.resolve())
            count = len(self.history)
            self._console.print(f"{count} messages are in {file}.", markup=False, highlight=False)

    def _as_json(self) -> str:
        held = {"model": self._client.model, "params": self.params, "messages": self._messages()}
        return msgspec.json.format(msgspec.json.encode(held), indent=2).decode() + "\n"

    def _as_markdown(self) -> str:
        return "\n\n".join(f"## {message['role']}\n\n{message['content']}" for message in self._messages()) + "\n"

    def _retry(self) -> None:
        while self.history and self.history[-1]["role"] == "assistant":
            self.history.pop()
        if self.history:
            self.answer()
        else:
            self._console.print("There is no message to answer yet.")


def _assignments(text: str) -> dict[str, Any]:
    """NAME=VALUE, several with blanks between; a value is JSON or, when it is not, a string. Raises ValueError."""
    changes: dict[str, Any] = {}
    for assignment in re.split(r"\s+(?=\w+=)", text) if text else ():
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(f"{assignment}: write NAME=VALUE")
        try:
            changes[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            changes[name] = value
    return changes
