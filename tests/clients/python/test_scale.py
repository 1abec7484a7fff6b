"""`nereid scale` before it asks a server."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from clients.python.cli import app


@pytest.mark.parametrize("frontends", ["0", "100000"])
def test_a_number_of_frontends_that_no_model_may_have_is_refused(frontends: str) -> None:
    result = CliRunner().invoke(app, ["scale", "m", frontends, "--url", "localhost:1"])
    assert result.exit_code == 2
    assert "Invalid value" in result.output
