"""What takes long: many long requests on a small pool, replacements in a row, loads and unloads, a soak.

python -m tests.chaos.endurance                         # all of it
python -m tests.chaos.endurance soak --minutes 30
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors.numpy import load_file, save_file

from engine.serving.launch import guard
from tests.chaos import invariants
from tests.chaos.clients import PROMPTS, Ask, Load, perform, undisturbed
from tests.chaos.faults import Problem, load_and_unload
from tests.chaos.fleet import SETTINGS, Fleet, Replica, until
from tests.chaos.schedule import Fault
from tests.chaos.watch import PROBE, Heartbeat

_FIRST_ID = 300
REQUESTS, LONG, HELD = 100, 10_000, 10  # requests; tokens of each; how many the pool holds
REPLACED, FRONTENDS = 100, 4
LOADS, WARM_LOADS = 50, 5
STREAMS = 8
_REPLACED_S = 120.0  # behind deaths in a row the next start waits for 32 s
_SAMPLE_S, _MINUTE_S = 5.0, 60.0
_SETTLE_S = 20.0
_STEADY_S = 600.0  # from which on a soak may not grow


def overcommit(_: float) -> str:
    """100 requests of 10,000 tokens each on a pool for ten of them: each has all of its tokens."""
    blocks = HELD * -(-(LONG + 100) // 16)
    settings = {**SETTINGS, "cache.num_blocks": str(blocks), "scheduler.max_rows": "32", "request_timeout_s": "86400"}
    settings |= {"scheduler.max_waiting": "128", "scheduler.token_budget": "2048", "speculation.tokens": "16"}
    with Fleet(replicas=1, settings=settings, prepare=_one_layer) as fleet:
        began = time.monotonic()

        def one(number: int) -> int:
            # Each has one token of its own, which drafts can guess, so that a step gives many.
            own = _FIRST_ID + number
            sampling = {"max_tokens": LONG, "temperature": 0.0, "ignore_eos": True, "allowed_token_ids": [own]}
            fields = {"text_input": PROMPTS[number % len(PROMPTS)], "sampling": sampling}
            outcome = perform(fleet, Ask("overcommit", "grpc", fields, stream=False, timeout_s=86_400.0), "0")
            return outcome.tokens[0].count(own) if outcome.error is None and outcome.ends == 1 else 0

        with ThreadPoolExecutor(REQUESTS) as pool:
            whole = sum(count == LONG for count in pool.map(one, range(REQUESTS)))
        seconds = time.monotonic() - began
        assert whole == REQUESTS, f"{whole} of {REQUESTS} requests have {LONG} tokens"
        assert until(lambda: not invariants.held(fleet), _SETTLE_S), invariants.held(fleet)
        gauges = fleet.replicas[0].gauges()
    preempted = gauges["num_preemptions_total"]
    return f"{whole} of {REQUESTS} requests have all of their {LONG} tokens, {preempted:g} preemptions, {seconds:.0f} s"


def replacements(_: float) -> str:
    """100 frontends killed, four at once: each is replaced, and the model answers each time."""
    with Fleet(replicas=1, frontends=FRONTENDS) as fleet:
        (replica,) = fleet.replicas
        longest, done, aborts = 0.0, 0, 0
        while done < REPLACED:
            dead = set(replica.pids("frontend"))
            replica.hit_stub = True
            for pid in dead:
                os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            whole = until(lambda: _replaced(fleet, replica, dead), _REPLACED_S, look_s=0.2)  # noqa: B023
            if not replica.alive() and replica.aborts():
                aborts += 1
                replica.wipe()
                replica.start()
                replica.wait_ready()
                continue
            assert whole, f"after {done} replacements none came within {_REPLACED_S:g} s:\n{replica.tail()}"
            longest = max(longest, time.monotonic() - began)
            done += len(dead)
    what = f"{done} frontends replaced, {FRONTENDS} at once, within {longest:.0f} s each time"
    return f"{what}; tritonserver aborted {aborts} times"


def _replaced(fleet: Fleet, replica: Replica, dead: set[int]) -> bool:
    if not replica.alive():
        return True
    living = set(replica.pids("frontend")) - dead
    return len(living) == FRONTENDS and perform(fleet, PROBE, "0").error is None


def loads(_: float) -> str:
    """50 loads and unloads of a model beside another: memory, descriptors and shared memory are as after the first."""
    with Fleet(replicas=1) as fleet:
        (replica,) = fleet.replicas
        measured = []
        for turn in range(WARM_LOADS + LOADS):
            load_and_unload(fleet, Fault(0.0, "load-unload"))
            if turn >= WARM_LOADS - 1:
                measured.append(_server(replica))
        first, last = measured[0], measured[-1]
    assert last[1] <= first[1], f"{last[1]} descriptors, {first[1]} before"
    assert last[2] <= first[2], f"{last[2]} regions of shared memory, {first[2]} before"
    grown = last[0] / first[0] - 1
    what = f"tritonserver's memory {first[0] >> 20} to {last[0] >> 20} MB ({grown:+.1%})"
    return f"{LOADS} loads and unloads: {what}, descriptors {first[1]} to {last[1]}, regions {first[2]} to {last[2]}"


def _server(replica: Replica) -> tuple[int, int, int]:
    """Bytes of memory, descriptors and shared memory regions of tritonserver."""
    (pid,) = replica.pids("server")
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    regions = guard.regions(pid) or set()
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd")), len(regions)


def soak(minutes: float) -> str:
    """Clients of every kind over TLS and gRPC on two replicas: no request is harmed, and nothing grows."""
    with Fleet(tls=True) as fleet:
        expected = undisturbed(fleet)
        beat, load = Heartbeat(fleet), Load(fleet, 1, STREAMS)
        beat.start()
        began = time.monotonic()
        load.start()
        sizes: list[tuple[float, dict[str, int]]] = []
        while time.monotonic() < began + 60 * minutes:
            time.sleep(_SAMPLE_S)
            measured = invariants.measure(fleet)
            sizes.append((time.monotonic() - began, {name: used.rss for name, used in measured.items()}))
        outcomes = load.stop()
        harmed = invariants.requests(outcomes, expected, [], beat, began)
        beat.close()
        until(lambda: not invariants.held(fleet), _SETTLE_S)  # what clients left a moment ago
        held = invariants.held(fleet)
        held += [crash for replica in fleet.replicas for crash in invariants.crashes(replica.log())]
    first = _least([rss for at, rss in sizes if _STEADY_S <= at < _STEADY_S + _MINUTE_S])
    last = _least([rss for at, rss in sizes if at > sizes[-1][0] - _MINUTE_S])
    rise = sum(last.values()) / sum(first.values()) - 1
    each = ", ".join(f"{name} {first.get(name, 0) / 2**20:.0f} to {size / 2**20:.0f}" for name, size in last.items())
    whole = ", ".join(f"{sum(rss.values()) / 2**20:.0f}" for rss in _each_ten_minutes(sizes))
    grown = f"memory from minute 11 to the last {rise:+.2%} (MB: {each}; all at the end of each ten minutes: {whole})"
    assert not harmed, f"{harmed}; {grown}"
    assert not held, f"{held}; {grown}"
    assert rise < 0.01, grown
    return f"{len(outcomes)} requests in {minutes:g} min, none harmed, no block left; {grown}"


def _each_ten_minutes(sizes: list[tuple[float, dict[str, int]]]) -> list[dict[str, int]]:
    """The last sample of each: whether memory still grows, or has found its level."""
    return list({at // (10 * _MINUTE_S): rss for at, rss in sizes}.values())


def _least(samples: list[dict[str, int]]) -> dict[str, int]:
    """Bytes by part and role, the fewest: renderers of chats come and go, and so do bodies."""
    return {name: min(sample.get(name, 0) for sample in samples) for name in samples[-1]}


def _one_layer(checkpoint: Path) -> None:
    """A decoder of one layer and a context that holds all of an answer."""
    file = checkpoint / "config.json"
    changes = {"num_hidden_layers": 1, "max_position_embeddings": 2 * LONG}
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    tensors = load_file(checkpoint / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layers." not in name or ".layers.0." in name}
    save_file(kept, checkpoint / "model.safetensors")


FIGURES: dict[str, Callable[[float], str]] = {
    "overcommit": overcommit,
    "replacements": replacements,
    "loads": loads,
    "soak": soak,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.endurance", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(FIGURES)}; default: all")
    parser.add_argument("--minutes", type=float, default=60.0, help="of the soak; more than 11")
    options = parser.parse_args()
    if unknown := set(options.names) - set(FIGURES):
        parser.error(f"no figure is called {', '.join(sorted(unknown))}: use {', '.join(FIGURES)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the fleet ends with it
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"commit {commit.stdout.strip()}, {platform.machine()}, {os.cpu_count()} cores", flush=True)
    failed = False
    for name in options.names or FIGURES:
        try:
            print(f"{name}: {FIGURES[name](options.minutes)}", flush=True)
        except (AssertionError, Problem) as error:
            failed = True
            print(f"{name}: FAILED: {error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
