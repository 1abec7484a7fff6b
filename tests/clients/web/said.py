"""What the stand-in answers in the tests of the page, and how they ask."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.clients.web.stand_in import Deltas, pieces

MARKDOWN = """A **queue** hands items from one thread to another. `queue.Queue` locks for you:

```python
from queue import Queue

jobs = Queue(maxsize=8)  # put() waits while it is full
jobs.put({"id": 42})
print(jobs.get(timeout=1.5))
```

| Class | Order | Bounded |
|---|---|---:|
| `Queue` | first in, first out | yes |
| `LifoQueue` | last in, first out | yes |
| `SimpleQueue` | first in, first out | no |

1. The producer calls `put`.
2. The consumer calls `get`, and `task_done` when it is finished.

See [the documentation](https://docs.python.org/3/library/queue.html).
"""
ATTACKS = [
    "<script>window.hit = 1</script>",
    '<img src=x onerror="window.hit = 1">',
    "<svg onload=window.hit=1><a href='javascript:window.hit=1'>x</a></svg>",
    "[click](javascript:window.hit=1) [click](data:text/html;base64,PHNjcmlwdD4=) [click](vbscript:x)",
    "![picture](https://example.org/?secret=1)",
    "```html\n<script>window.hit = 1</script>\n```",
    '```"><img src=x onerror=window.hit=1>\nx\n```',
    "<iframe srcdoc='<script>parent.hit=1</script>'></iframe><style>*{display:none}</style><form action=/x><input>",
    '<math><mtext></form><form><mglyph><style></math><img src onerror="window.hit=1">',
    "| <img src=x onerror=window.hit=1> |\n|---|\n| <base href=//example.org> |",
]
CALL = {"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": '{"city": "Pa'}}
REST = {"index": 0, "function": {"arguments": 'ris"}'}}
ANSWERS: dict[str, str | Deltas] = {
    "How do threads share work?": [{"reasoning_content": "The user asks about queues."}, *pieces(MARKDOWN)],
    "Attack.": pieces("\n\n".join(ATTACKS)),
    "Refuse.": "`temperature` must be at most 2.",
    "Weather?": [
        {"reasoning_content": "A tool knows."},
        {"content": "I look."},
        {"tool_calls": [CALL]},
        {"tool_calls": [REST]},
    ],
}


def say(page: Page, text: str) -> None:
    answers = page.locator(".message.assistant").count()
    page.fill("#text", text)
    page.press("#text", "Enter")
    expect(page.locator(".message.assistant")).to_have_count(answers + 1)
    expect(page.locator("#send")).to_be_visible()
