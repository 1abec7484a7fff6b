"""The console of the `nereid` commands: rich's, on which text of others shows and does nothing."""

from __future__ import annotations

from typing import Any

import rich.console
from rich.text import Text

from engine.plain import plain


class Console(rich.console.Console):
    """Every string that is printed, in a table too, is written plain; styles are the business of its markup."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(plain(text), **options)
