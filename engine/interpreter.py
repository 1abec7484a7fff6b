"""Processes under the Python that NEREID_PYTHON names, or the one that this process runs under."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

from engine import env


def start(arguments: Sequence[str], **popen: Any) -> subprocess.Popen[bytes]:
    """Run that Python with `arguments`, as Popen does. Raises OSError, with a sentence as its `strerror` where the
    Python itself cannot be run."""
    python = str(env.read().python)
    try:
        return subprocess.Popen([python, *arguments], **popen)
    except OSError as error:
        if error.filename is None:  # there is no process to be had, whatever it would run
            raise
        raise OSError(
            error.errno,
            f"{python} cannot be run ({error.strerror}): set {env.PYTHON} to a Python that has Nereid's packages",
        ) from None
