"""Locust's users, in a process of their own: gevent replaces the standard library's sockets and threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

OPEN_ARRIVALS = """
import sys
sys.argv = ["locust"]
from argparse import Namespace
from perf.load.locustfile import StreamUser
import gevent
from locust.env import Environment


class SlowUser(StreamUser):
    way = "slow"
    started = 0

    def responses(self):
        type(self).started += 1
        gevent.sleep(0.4)
        yield 1


environment = Environment(user_classes=[SlowUser], stop_timeout=10)
environment.parsed_options = Namespace(rate=50.0, burst=1, max_tokens=1)
runner = environment.create_local_runner()
runner.start(1, spawn_rate=1)
gevent.sleep(0.7)
runner.quit()
ended = environment.stats.get("slow", "E2E")
assert SlowUser.started > 5 and ended.num_requests == SlowUser.started, (SlowUser.started, ended.num_requests)
assert not ended.num_failures
"""


def test_requests_that_are_on_their_way_when_users_stop_end_by_themselves() -> None:
    done = subprocess.run([sys.executable, "-c", OPEN_ARRIVALS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
