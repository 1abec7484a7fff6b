"""Is this tritonserver of use? The model named by HEALTH_MODEL generates tokens. Exit status 0 or 1.

It asks for one token, ahead of the queue. A server that has no time for the token, but gives tokens to others
meanwhile, is busy and not stuck: to restart it would only make things worse.

With --ready it generates nothing and asks whether a new request would be served now, in a fraction of a second: the
model says for itself what is wrong. The server's own answers do not tell: /v2/models/NAME/ready stays 200 while an
engine hangs or starts again, and /v2/health/ready ends with the first load of any model that fails.

Standard library only: it runs in any image that has a Python.
"""

import json
import os
import re
import sys
import time
import urllib.error
import urllib.request

URL = os.environ.get("HEALTH_URL", "http://127.0.0.1:8000/v2")
METRICS = os.environ.get("HEALTH_METRICS", "http://127.0.0.1:8002/metrics")
MODEL = os.environ.get("HEALTH_MODEL", "demo")
TIMEOUT_S = 8
READY_S = 4
COUNTED_S = 1.5  # frontends write their counts twice a second


def main() -> int:
    if sys.argv[1:] == ["--ready"]:
        trouble = described()
        if trouble is not None:
            print(f"{MODEL}: {trouble}")
        return 0 if trouble is None else 1
    before = num_generated()
    trouble = ask()
    if trouble is None:
        return 0
    time.sleep(COUNTED_S)
    busy = num_generated() > before
    print(f"{MODEL}: {trouble}{'; but it generates for others' if busy else ''}")
    return 0 if busy else 1


def ask() -> str | None:
    """What is wrong; None when a token came."""
    wanted = {"max_tokens": 1, "timeout_s": TIMEOUT_S, "priority": -(2**31)}
    body = {"text_input": "a", "sampling_parameters": json.dumps(wanted)}
    told = post(body, TIMEOUT_S)
    # A failure after the response began comes with status 200: the body decides.
    return told if isinstance(told, str) else None if "text_output" in told else str(told)


def described() -> str | None:
    """Why requests would wait now; None when they would not."""
    told = post({"describe": True}, READY_S)
    if isinstance(told, str):
        return told
    try:
        return json.loads(told["description"])["problem"] or None
    except (KeyError, TypeError, ValueError):
        return str(told)


def post(body: dict[str, object], timeout_s: float) -> dict[str, object] | str:
    """What the model answers, or what is wrong."""
    request = urllib.request.Request(
        f"{URL}/models/{MODEL}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        return f"{error}: {error.read(400).decode(errors='replace')}"
    except (OSError, ValueError) as error:
        return str(error)


def num_generated() -> float:
    """Tokens that the model has generated so far; 0 when nothing tells."""
    try:
        with urllib.request.urlopen(METRICS, timeout=1) as answer:
            page = answer.read().decode()
    except (OSError, ValueError):
        return 0.0
    counts = re.findall(rf'^vllm:generation_tokens_total{{[^}}]*model="{re.escape(MODEL)}".*}} (\S+)$', page, re.M)
    return sum(map(float, counts))


if __name__ == "__main__":
    sys.exit(main())
