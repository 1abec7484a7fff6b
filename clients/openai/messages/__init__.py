"""The Messages API, as Anthropic's SDKs speak it: POST /v1/messages and /v1/messages/count_tokens.

A request becomes a `ChatRequest`, and the deltas of its `ChatCall` become content blocks.
"""
