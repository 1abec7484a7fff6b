"""Schedules that broke a promise once, each as small as it could be made, and a test now. What is tritonserver 2.51's
own the harness excuses, as docs/reliability.md says."""

from __future__ import annotations

from dataclasses import dataclass

from tests.chaos.schedule import Schedule, parse


@dataclass(frozen=True)
class Found:
    """line: the schedule. broke: what it broke when it was found."""

    line: str
    broke: str

    @property
    def schedule(self) -> Schedule:
        return parse(self.line)


FOUND = {
    "engine-deaths-while-starting": Found(
        "seed 1 for 12; 3 kill-engine 0 x3", "open requests ended with `the engine died 3 times`"
    ),
    "frontends-die-again": Found(
        "seed 1 for 12; 3 kill-frontends 0 for 0.1 x2",
        "requests through the shim had no end; none came back",
    ),
    "tokenizer-dies-again": Found("seed 1 for 12; 3 kill-tokenizer 0 x2", "no other tokenizer took its place"),
    "run-folder-removed": Found("seed 1 for 12; 3 remove-run-folder 0", "no engine was started any more"),
    "disk-full": Found("seed 1 for 12; 3 fill-disk 0 for 3", "no engine was started any more"),
    "deadline-while-the-engine-hangs": Found(
        "seed 1 for 10; 2 stop-engine 0 for 4.5; 2 stop-engine 1 for 4.5",
        "requests with 2 s of time ended when the engine went on",
    ),
    "engine-that-hangs-is-ready": Found(
        # By the shim's word: tritonserver 2.51 has none for a model whose engine hangs.
        "seed 1 for 16; 2 stop-engine 0 for 12",
        "`/ready` said 200, and a probe was answered after 8 s",
    ),
    "idle-stream-at-the-end": Found("seed 1 for 8; 3 term-serve 0", "the server never ended"),
    "frontend-that-stands-still": Found(
        "seed 2 for 10; 2 hang-frontend 0 for 2", "tritonserver 2.51 aborted (boost::interprocess::lock_exception)"
    ),
    "frontends-die-while-they-ask": Found(
        # One of 14 such rounds hung before the mend.
        "seed 3 for 20; 3 kill-frontends 0 for 1.2 x2; 12 kill-frontends 1 for 1.2 x2",
        "the load that was to replace them waited for the dead to take an answer, for 300 s",
    ),
    "frontends-die-while-the-dead-are-taken-out": Found(
        "seed 22402 for 60; 41.8 kill-frontends 1 pick 5 for 0.6 x2",
        "the load waited 67 s for dead instances that refused what waited for the model, at a second each",
    ),
    "engine-dies-while-frontends-are-added-and-the-folder-is-gone": Found(
        "seed 3511 for 24; 3 kill-engine 1 pick 28 for 0.1 x3; 7 scale 1 pick 17 for 1.5; 10.7 remove-run-folder 1",
        "the new frontend took it for a failed first load, and the model was gone for good",
    ),
    "serve-killed": Found("seed 1 for 8; 3 kill-serve 0", "tritonserver, frontends and engine stayed, with the ports"),
    "hostile-fields": Found(
        "seed 1 for 10; 1 hostile-deep-arguments 0; 2 hostile-only-stops-allowed 0; 3 hostile-huge-bias 0; "
        "4 hostile-template-overflow 0; 5 hostile-long-name 0; 6 hostile-long-field 0; 7 hostile-long-header 0; "
        "8 hostile-schemas-of-tools 0",
        "stack traces, echoes of 100 KB, headers without a bound",
    ),
    "template-that-spins": Found("seed 1 for 10; 2 hostile-spinning-template 0", "the tokenizer stood still for good"),
    "megabytes-of-words": Found(
        "seed 1 for 10; 2 hostile-bad-words 0; 4 hostile-allowed-ids 0", "the others waited for a minute"
    ),
    "grammars-that-take-long": Found(
        "seed 1 for 10; 2 hostile-ambiguous-grammar 0; 3 hostile-many-expressions 1; 6 kill-renderer 0",
        "the others waited for seconds a token, and the engine ended for lack of memory",
    ),
    "shape-without-content": Found("seed 1 for 10; 2 hostile-raw-empty-shape 0", "the frontend died"),
    "fewer-frontends": Found(
        "seed 1 for 14; 3 scale 0 for 1; 7 scale 0 pick 1 for 1", "a stream of the removed frontend had no end"
    ),
}
