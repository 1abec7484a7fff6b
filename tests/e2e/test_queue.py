"""Admission: a full queue says so, and what was admitted is served."""

from __future__ import annotations

import json

from tritonclient.utils import InferenceServerException

from tests.e2e.harness import Call, Server

PROMPT = "A server takes a question and"


def test_full_queue_is_refused_as_unavailable_and_the_others_are_served(server: Server) -> None:
    """16 rows and 24 places in the queue: of 80 requests at once some find no place, and none is lost."""
    fields = json.dumps({"max_tokens": 16, "temperature": 0.0, "ignore_eos": True})
    calls = [Call(server, text_input=f"{PROMPT} {i}", sampling_parameters=fields) for i in range(80)]
    served, refused = 0, []
    for call in calls:
        try:
            call.all()
            served += 1
        except InferenceServerException as error:
            refused.append(str(error))
    assert served >= 24
    assert served + len(refused) == 80
    assert refused, "the queue was never full: this test needs more requests"
    assert all("the queue is full: 24 requests wait and 24 may" in sentence for sentence in refused)
