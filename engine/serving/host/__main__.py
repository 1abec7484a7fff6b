"""`python -m engine.serving.host`: what a frontend's supervisor starts."""

from __future__ import annotations

import sys

from engine.serving.host.host import main

main(sys.argv[1:])
