"""Every metric of a model, once: names, what they say, buckets of histograms.

Names and buckets of `vllm:` are vLLM's, so that dashboards and alerts made for it show data. What vLLM has no figure
for has our own prefix. docs/environment.md says which of vLLM's are not here, and why.
"""

from __future__ import annotations

_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_PER_TOKEN = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
_PER_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_ANSWERS = (1.0, 2.0, 5.0, 10.0, 20.0)

GAUGES = {
    "vllm:num_requests_running": "Requests that the engine computes",
    "vllm:num_requests_waiting": "Requests in the engine's queue",
    "vllm:kv_cache_usage_perc": "Share of the KV blocks in use, 0 to 1",
    "vllm:kv_cache_blocks_used": "KV blocks in use by requests",
    "vllm:kv_cache_blocks_total": "KV blocks in the pool",
    # A gauge, because a frontend that comes when all others have died has to write it.
    "nereid:frontends": "Frontends that the engine process is connected to",
    "nereid:frontends_lost": "Frontends that died since the engine process started",
}
WAITING_BY_REASON = "vllm:num_requests_waiting_by_reason"
SLEEP_STATE = "vllm:engine_sleep_state"
CACHE_CONFIG = "vllm:cache_config_info"
LABELLED_GAUGES = {
    WAITING_BY_REASON: "Requests in the engine's queue by what they wait for",
    SLEEP_STATE: "1 for the state that the engine is in; this one is always awake",
    CACHE_CONFIG: "Always 1; the labels say how the KV cache is made",
}

PREFIX_QUERIES = "vllm:prefix_cache_queries_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"
PREEMPTIONS = "vllm:num_preemptions_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED_TOKENS = "vllm:spec_decode_num_accepted_tokens_total"
LATE_COMPILES = "nereid:late_compiles_total"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
CACHED_TOKENS = "vllm:prompt_tokens_cached_total"
GENERATION_TOKENS = "vllm:generation_tokens_total"
COUNTERS = {
    PREFIX_QUERIES: "Prompt tokens looked up in the prefix cache",
    PREFIX_HITS: "Prompt tokens found in the prefix cache",
    PREEMPTIONS: "Requests put back into the queue because blocks ran out",
    DRAFTS: "Times that a request had tokens drafted in a step",
    DRAFT_TOKENS: "Tokens drafted",
    ACCEPTED_TOKENS: "Drafted tokens that the model drew as well",
    LATE_COMPILES: "Kernels compiled after the engine was ready: each held up every request",
    PROMPT_TOKENS: "Prompt tokens of requests that were answered",
    CACHED_TOKENS: "Of these, tokens that the prefix cache held",
    GENERATION_TOKENS: "Tokens generated",
}
BY_SOURCE = "vllm:prompt_tokens_by_source_total"
SUCCESS = "vllm:request_success_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
LABELLED_COUNTERS = {
    BY_SOURCE: "Prompt tokens of requests that were answered, by where their keys and values came from",
    SUCCESS: "Requests by how they ended",
    ACCEPTED_AT: "Drafted tokens that the model drew as well, by their place among those of a step",
}
COMPUTED, CACHED = "local_compute", "local_cache_hit"

TTFT = "vllm:time_to_first_token_seconds"
ITL = "vllm:inter_token_latency_seconds"
ITL_OLD_NAME = "vllm:time_per_output_token_seconds"
E2E = "vllm:e2e_request_latency_seconds"
QUEUE = "vllm:request_queue_time_seconds"
PREFILL = "vllm:request_prefill_time_seconds"
DECODE = "vllm:request_decode_time_seconds"
INFERENCE = "vllm:request_inference_time_seconds"
MEAN_PER_TOKEN = "vllm:request_time_per_output_token_seconds"
PROMPT = "vllm:request_prompt_tokens"
GENERATION = "vllm:request_generation_tokens"
LONGEST = "vllm:request_max_num_generation_tokens"
COMPUTED_PROMPT = "vllm:request_prefill_kv_computed_tokens"
MAX_TOKENS = "vllm:request_params_max_tokens"
N = "vllm:request_params_n"
STEP_TOKENS = "vllm:iteration_tokens_total"
HISTOGRAMS = {
    TTFT: ("From a request's arrival to its first token", _TTFT),
    ITL: ("Between two tokens of a request, of many a sample", _PER_TOKEN),
    ITL_OLD_NAME: ("Between two tokens of a request, under vLLM's older name", _PER_TOKEN),
    E2E: ("From a request's arrival to its last token", _PER_REQUEST),
    QUEUE: ("From the engine's taking a request to the first step that computes of it", _PER_REQUEST),
    PREFILL: ("From that step to the first token", _PER_REQUEST),
    DECODE: ("From the first token to the last", _PER_REQUEST),
    INFERENCE: ("From the first step to the last token", _PER_REQUEST),
    MEAN_PER_TOKEN: ("Of a request the mean time between two tokens", _PER_TOKEN),
    PROMPT: ("Prompt tokens of a request", _TOKENS),
    GENERATION: ("Tokens generated for a request", _TOKENS),
    LONGEST: ("Tokens of the longest answer of a request", _TOKENS),
    COMPUTED_PROMPT: ("Prompt tokens of a request that the prefix cache did not hold", _TOKENS),
    MAX_TOKENS: ("max_tokens of a request", _TOKENS),
    N: ("n of a request", _ANSWERS),
}
STEP_TEXT = "Tokens that a step of the engine computes, of many a sample"
