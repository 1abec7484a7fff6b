"""The Responses API of OpenAI: POST /v1/responses, and what it keeps of them under /v1/responses/{id}.

A request becomes a `ChatRequest`, and the deltas of its `ChatCall` become output items.
"""
