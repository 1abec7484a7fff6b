"""Is this tritonserver of use? The model named by HEALTH_MODEL generates tokens and is ready. Exit status 0 or 1.

It asks for one token, ahead of the queue, and for the readiness of this model alone: the server's own ends with the
first load of any model that fails. A server that has no time for the token, but gives tokens to others meanwhile, is
busy and not stuck: to restart it would only make things worse. Standard library only: it runs in any image that has a
Python.
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
COUNTED_S = 1.5  # frontends write their counts twice a second


def main() -> int:
    before = num_generated()
    trouble = ask()
    if trouble is None:
        return 0
    time.sleep(COUNTED_S)
    busy = num_generated() > before
    print(f"{MODEL}: {trouble}{'; but it generates for others' if busy else ''}")
    return 0 if busy else 1


def ask() -> str | None:
    """What is wrong; None when a token came and the model says that it is ready."""
    wanted = {"max_tokens": 1, "timeout_s": TIMEOUT_S, "priority": -(2**31)}
    body = {"text_input": "a", "sampling_parameters": json.dumps(wanted)}
    request = urllib.request.Request(
        f"{URL}/models/{MODEL}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            told = json.load(answer)
        urllib.request.urlopen(f"{URL}/models/{MODEL}/ready", timeout=TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        return f"{error}: {error.read(400).decode(errors='replace')}"
    except (OSError, ValueError) as error:
        return str(error)
    # A failure after the response began comes with status 200: the body decides.
    return None if "text_output" in told else str(told)


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
