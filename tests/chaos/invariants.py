"""What must hold: for every request, for what `/ready` said, and for what is left after the storm."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from engine.structured.threads import usual_threads
from tests.chaos.clients import SHIM, Outcome
from tests.chaos.faults import KINDS
from tests.chaos.fleet import Fleet, Marked, until
from tests.chaos.schedule import Fault
from tests.chaos.watch import PROBE_S, Heartbeat, Look

DEADLINE_S = 1.0
KNOWN_S = 4.0  # after which an engine that says nothing is known: 1 s, a look of the shim, 2 s of it
_AFTER_S = 1.0  # requests that begin so soon after a fault is over may still meet it
_SETTLE_S = 20.0
_CLOSE = 2e-3  # of log-probabilities, float32
_MORE_FDS = 12
_MORE_THREADS = 8 + usual_threads()  # of masks there are as many as one step has needed
_STUBS = ("frontend", "tokenizer")
# What a server that is ending says of its models, and of requests that it waits for no longer.
_ENDING, _TOLD = "has no available versions", "the server was told to stop"
_INHERITED_FDS = 64  # a stub that is started under load has tritonserver's open connections
_CUT = re.compile(r"failed to connect|Socket closed|[Cc]onnection|Broken|RST_STREAM|GOAWAY|no longer in valid state")
# What an engine says of the exception that its loop ended by, and those that limits of the machine make.
_FAILED = re.compile(r"the engine's loop failed\nTraceback.*?\n(?=\w)(?P<why>[^\n]+)", re.DOTALL)
_LIMITED = re.compile(r"MemoryError|OSError|\w+IOError|.*can't allocate memory")
_MORE_RSS, _MORE_RSS_BYTES = 1.3, 80 << 20


@dataclass(frozen=True)
class Violation:
    """rule: which promise was broken, one word. what: a sentence with the figures."""

    rule: str
    what: str


@dataclass(frozen=True)
class Window:
    """When a fault was at work. problem: the promise about itself that was broken. aborted: tritonserver ended by
    itself, as is known of 2.51."""

    fault: Fault
    began: float
    ended: float
    problem: str | None = None
    aborted: bool = False

    def meets(self, began: float, ended: float) -> bool:
        return began <= self.ended + _AFTER_S and ended >= self.began


def classify(outcome: Outcome) -> str:
    """One word for how a request ended: ok, left, lost, late, unavailable, stub, broken, refused or internal."""
    if outcome.lost:
        return "lost"
    if outcome.left:
        return "left"
    text = outcome.error
    if text is None:
        return "ok"
    # 2.51's word for a dead stub is the way's failure; "Traceback" never is.
    if "Traceback" in text or "site-packages" in text:
        return "internal"
    if _TOLD in text:
        return "unavailable"
    if "timeout" in text or "deadline" in text.lower() or outcome.status == 504:
        return "late"
    if "not healthy" in text or "Stub process" in text:
        return "stub" if outcome.door != SHIM or outcome.status == 503 else "internal"
    if outcome.status == 0 or _CUT.search(text):
        return "broken"
    if outcome.status in (429, 503) or "UNAVAILABLE" in text or "unavailable" in text or _ENDING in text:
        return "unavailable"
    return "refused" if outcome.status == 400 else "internal"


def requests(
    outcomes: Iterable[Outcome],
    expected: Mapping[str, Outcome],
    windows: Iterable[Window],
    beat: Heartbeat,
    began: float,
) -> list[Violation]:
    """Each request has one end, its own tokens or an error that a fault excuses, in time. began: the storm."""
    windows = list(windows)
    found = []
    for outcome in outcomes:
        met = [w for w in windows if w.meets(outcome.began, outcome.ended) and _touches(w, outcome)]
        found += _one(outcome, expected.get(outcome.ask.name), met, beat, began)
    return found


def recovery(windows: Iterable[Window]) -> list[Violation]:
    """What each fault promises about itself, but for one on a replica whose tritonserver aborts meanwhile."""
    windows = list(windows)
    found = []
    for window in windows:
        aborted = [w for w in windows if w.aborted and w is not window and w.fault.replica == window.fault.replica]
        if window.problem is not None and not any(w.meets(window.began, window.ended) for w in aborted):
            found.append(Violation("recovery", f"{window.fault}: {window.problem}"))
    return found


def _touches(window: Window, outcome: Outcome) -> bool:
    return outcome.door in (SHIM, str(window.fault.replica)) or window.fault.kind.endswith("worker")


def _one(
    outcome: Outcome, expected: Outcome | None, met: list[Window], beat: Heartbeat, began: float
) -> list[Violation]:
    end = classify(outcome)
    times = f"at {outcome.began - began:.1f} s for {outcome.ended - outcome.began:.1f} s"
    named = f"{outcome.ask.name} by {outcome.door}, {times}, during {_names(met)}"
    found = []
    excused = {word for w in met for word in _excuses(w, outcome.door)}
    slack = beat.late(outcome.began, outcome.ended) + _held_up_s(outcome, met)
    over = outcome.ended - outcome.began - outcome.ask.timeout_s - DEADLINE_S - slack
    if over <= 0:
        excused.add("lost")  # on its own cores it might have ended before its client gave it up
    if end not in ("ok", "left") and end not in excused and not (end == "late" and _past(outcome)):
        error = (outcome.error or "nothing came")[:300]
        found.append(Violation("lost" if end == "lost" else "error", f"{named}: {end}: {error}"))
    if end not in ("left", "lost") and outcome.ends != 1 and not (end == "ok" and outcome.error):
        found.append(Violation("ends", f"{named}: {outcome.ends} ends"))
    if expected is not None:
        whole = end == "ok"
        for place, (got, wanted) in enumerate(zip(outcome.tokens, expected.tokens, strict=True)):
            upto = max(len(got), len(wanted)) if whole else min(len(got), len(wanted))
            if got[:upto] != wanted[:upto]:
                at = next((n for n, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), len(got))
                what = f"choice {place} has {len(got)} of {len(wanted)} tokens and differs at {at}"
                found.append(Violation("tokens", f"{named}: {what}"))
        near = all(math.isclose(a, b, abs_tol=_CLOSE) for a, b in zip(outcome.values, expected.values, strict=False))
        if not near or (whole and len(outcome.values) != len(expected.values)):
            found.append(Violation("logprobs", f"{named}: log-probabilities differ"))
    # What a dead frontend held has no end of its own: a later fault gave it one.
    cut = "lost" in excused and end in ("broken", "unavailable", "stub")
    if over > 0 and end not in ("left", "lost") and not cut:
        what = f"{named}: ended {over:.1f} s after its deadline, 1 s and {slack:.1f} s of this machine"
        found.append(Violation("deadline", what))
    return found


def _held_up_s(outcome: Outcome, met: list[Window]) -> float:
    """How long faults kept from a request what could have ended it."""
    stopped = sum(w.fault.hold_s for w in met if KINDS[w.fault.kind].stops)
    queues = (w for w in met if KINDS[w.fault.kind].queues and outcome.door != SHIM)
    return stopped + max((w.ended - outcome.began for w in queues if w.ended > outcome.began), default=0.0)


def _excuses(window: Window, door: str) -> frozenset[str]:
    kind = KINDS[window.fault.kind]
    return kind.shim if door == SHIM else kind.direct


def _past(outcome: Outcome) -> bool:
    return outcome.ended - outcome.began >= outcome.ask.timeout_s - DEADLINE_S


def _names(met: list[Window]) -> str:
    return ", ".join(w.fault.kind for w in met) or "no fault"


def readiness(looks: Iterable[Look], windows: Iterable[Window], beat: Heartbeat) -> list[Violation]:
    """A replica that is said to be ready answers a request within five seconds, but for one whose fault is so young
    that nobody can know of it."""
    windows = list(windows)
    found = []
    for look in looks:
        probe = look.probe
        if probe is None:
            continue
        met = [w for w in windows if w.meets(probe.began, probe.ended) and _touches(w, probe)]
        took = probe.ended - probe.began
        slack = beat.late(probe.began, probe.ended) + _held_up_s(probe, met)
        end = classify(probe)
        excused = {word for w in met for word in _excuses(w, probe.door)}
        young = any(w.began > look.at - KNOWN_S for w in met)
        late = took > PROBE_S + slack and not young
        if end not in excused and (late or end not in ("ok", "late")):
            what = f"replica {look.replica} was called ready; a probe: {end} after {took:.1f} s, during {_names(met)}"
            found.append(Violation("ready", f"{what}: {(probe.error or '')[:200]}"))
    return found


@dataclass(frozen=True)
class Usage:
    """What the processes of one role hold: how many they are, the most descriptors and threads of one, RSS of all."""

    count: int
    descriptors: int
    threads: int
    rss: int


def usage(part: Marked, roles: Mapping[str, list[int]]) -> dict[str, Usage]:
    made = {}
    for role, pids in roles.items():
        sizes = []
        for pid in pids:
            try:
                process = psutil.Process(pid)
                sizes.append((len(os.listdir(f"/proc/{pid}/fd")), process.num_threads(), process.memory_info().rss))
            except (psutil.Error, OSError):
                continue
        if sizes:
            fds, threads, rss = zip(*sizes, strict=True)
            made[role] = Usage(len(sizes), max(fds), max(threads), sum(rss))
    return made


def measure(fleet: Fleet) -> dict[str, Usage]:
    """Usage by part and role."""
    parts = [(f"replica {r.number}", r, r.roles()) for r in fleet.replicas] + [("shim", fleet.shim, fleet.shim.roles())]
    return {f"{name} {role}": used for name, part, roles in parts for role, used in usage(part, roles).items()}


def crashes(log: str) -> list[Violation]:
    """Engines whose loop an exception ended: the next one goes on with their streams, so that no request shows it."""
    ends = [found["why"] for found in _FAILED.finditer(log)]
    return [Violation("crash", f"the engine's loop ended by {why}") for why in ends if not _LIMITED.match(why)]


def keeping(fleet: Fleet) -> set[int]:
    """Replicas with a set of frontends that the server never ends: it does not forget what a dead frontend held."""
    return {replica.number for replica in fleet.replicas if replica.keeps_frontends}


def leftovers(fleet: Fleet, before: Mapping[str, Usage], kept: set[int]) -> list[Violation]:
    """Blocks, rows, processes, descriptors, threads, shared memory and RSS are back, after a time to settle. But for
    the frontends, and regions, of replicas that kept some then (`kept`) or do so now."""
    found: list[Violation] = []
    keep = tuple(f"replica {number} {role}:" for number in kept | keeping(fleet) for role in ("frontend", "server"))

    def clean() -> bool:
        grown = _grown(before, measure(fleet))
        found[:] = held(fleet) + [v for v in grown if not v.what.startswith(keep)]
        return not found

    until(clean, _SETTLE_S, look_s=0.5)
    return found


def held(fleet: Fleet) -> list[Violation]:
    """What requests that have ended still hold, and shared memory of processes that are gone."""
    found = []
    for replica in fleet.replicas:
        gauges = replica.gauges()
        for name in ("kv_cache_blocks_used", "num_requests_running", "num_requests_waiting"):
            if gauges.get(name, 0.0) != 0.0:
                found.append(Violation("blocks", f"replica {replica.number}: {name} is {gauges[name]:g}"))
        if "num_requests_running" not in gauges:
            found.append(Violation("blocks", f"replica {replica.number} has no gauges"))
        stale = replica.stale_regions()
        if stale and not replica.keeps_frontends:
            sizes = sum((Path("/dev/shm") / name).stat().st_size for name in stale)
            what = f"{len(stale)} regions of shared memory of instances that are gone, {sizes >> 20} MB"
            found.append(Violation("shared-memory", f"replica {replica.number}: {what}"))
    return found


def _grown(before: Mapping[str, Usage], after: Mapping[str, Usage]) -> list[Violation]:
    found = []
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name, Usage(0, 0, 0, 0)), after.get(name, Usage(0, 0, 0, 0))
        if name.endswith("renderer"):  # as many as were needed at once; it ends what it cannot use
            continue
        if was.count != now.count:
            found.append(Violation("processes", f"{name}: {now.count} processes, before {was.count}"))
        elif now.descriptors > was.descriptors + (_INHERITED_FDS if name.endswith(_STUBS) else _MORE_FDS):
            found.append(Violation("descriptors", f"{name}: {now.descriptors} descriptors, before {was.descriptors}"))
        elif now.threads > was.threads + _MORE_THREADS:
            found.append(Violation("threads", f"{name}: {now.threads} threads, before {was.threads}"))
        elif now.rss > was.rss * _MORE_RSS + _MORE_RSS_BYTES:
            found.append(Violation("rss", f"{name}: {now.rss >> 20} MB resident, before {was.rss >> 20}"))
    return found
