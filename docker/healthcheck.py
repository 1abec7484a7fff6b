"""Is this tritonserver of use? Ready, and the model named by HEALTH_MODEL generates a token. Exit status 0 or 1.

Standard library only: it runs in any image that has a Python.
"""

import json
import os
import sys
import urllib.error
import urllib.request

URL = os.environ.get("HEALTH_URL", "http://127.0.0.1:8000/v2")
TIMEOUT_S = 10


def main() -> int:
    model = os.environ.get("HEALTH_MODEL", "demo")
    body = {"text_input": "a", "sampling_parameters": json.dumps({"max_tokens": 1, "timeout_s": TIMEOUT_S})}
    request = urllib.request.Request(
        f"{URL}/models/{model}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        urllib.request.urlopen(f"{URL}/health/ready", timeout=TIMEOUT_S).close()
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            told = json.load(answer)
    except (OSError, ValueError) as error:
        print(f"{model}: {error}")
        return 1
    # A failure after the response began comes with status 200: the body decides.
    if "text_output" not in told:
        print(f"{model}: {told}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
