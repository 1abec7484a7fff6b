"""What one answer is read with: its thinking, its text and its calls, in the model's own forms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clients.openai.calls.forms import FORMS
from clients.openai.calls.harmony import HarmonyReader
from clients.openai.reasoning import TAGS, Begins, ReasoningSplitter
from clients.openai.tools import Delta, ForcedParser, PlainParser, ReasoningDelta, ToolParser

if TYPE_CHECKING:
    from clients.openai.model_forms import ModelForms
    from clients.openai.schema import ChatRequest


class AnswerReader:
    """Thinking comes first, text and calls behind it."""

    def __init__(self, splitter: ReasoningSplitter, tools: ToolParser) -> None:
        self._splitter = splitter
        self._tools = tools

    @property
    def calls_done(self) -> int:
        return self._tools.calls_done

    def feed(self, text: str) -> list[Delta]:
        return self._deltas(*self._splitter.feed(text))

    def finish(self) -> list[Delta]:
        return [*self._deltas(*self._splitter.finish()), *self._tools.finish()]

    def _deltas(self, reasoning: str, content: str) -> list[Delta]:
        deltas: list[Delta] = [ReasoningDelta(reasoning)] if reasoning else []
        return deltas + self._tools.feed(content) if content else deltas


def reader_of(request: ChatRequest, forms: ModelForms, begins: Begins, prompt: str) -> ToolParser:
    """For one answer. begins: where it does; prompt: the end of the rendered conversation."""
    if forms.channels:
        return HarmonyReader([tool.function.name for tool in request.active_tools], prompt)
    splitter = ReasoningSplitter(TAGS.get(forms.reasoning), begins)
    return AnswerReader(splitter, _tool_parser(request, forms))


def _tool_parser(request: ChatRequest, forms: ModelForms) -> ToolParser:
    begun = forms.begun(request)
    if begun is not None:
        return ForcedParser(begun)
    if not request.active_tools:
        return PlainParser()
    return FORMS[forms.tools].parser(request.active_tools)
