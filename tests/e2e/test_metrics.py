"""The metrics port tells what happened, under vLLM's names, summed over the frontends."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

from engine.serving.launch import repository
from tests.e2e.harness import Call, Server, wait_until
from tests.serving.frontend.test_metrics import VLLM_NAMES

PROMPT = "A server takes a question and gives an answer, and the answer is not always short."
FIELDS = json.dumps({"max_tokens": 12, "temperature": 0.0, "ignore_eos": True})


def settled(server: Server, names: tuple[str, ...]) -> dict[str, float]:
    """The metrics once they stand still: what other tests did is written within half a second."""
    last: dict[str, float] = {}
    while (read := {name: server.metric(name, model="demo", version="1") for name in names}) != last:
        last = read
        time.sleep(0.8)
    return read


def test_counters_and_histograms_add_up_over_the_frontends(server: Server) -> None:
    names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:e2e_request_latency_seconds_count")
    names += ("vllm:time_to_first_token_seconds_count", "vllm:prefix_cache_queries_total")
    before = settled(server, names)
    ended = server.metric("vllm:request_success_total", model="demo", finished_reason="length")
    calls = [Call(server, text_input=PROMPT, stream=True, sampling_parameters=FIELDS) for _ in range(4)]
    for call in calls:
        call.all()
    prompt = len(Call(server, "tokenizer", text_input=PROMPT).all()[0]["input_ids"])

    def grown(name: str) -> float:
        return server.metric(name, model="demo", version="1") - before[name]

    wait_until(lambda: grown("vllm:e2e_request_latency_seconds_count") == 4, "four requests are counted", 10.0)
    assert server.metric("vllm:request_success_total", model="demo", finished_reason="length") == ended + 4
    assert grown("vllm:generation_tokens_total") == 48
    assert grown("vllm:prompt_tokens_total") == 4 * prompt
    assert grown("vllm:time_to_first_token_seconds_count") == 4
    wait_until(lambda: grown("vllm:prefix_cache_queries_total") >= 4 * prompt, "the engine's counters follow", 10.0)
    assert server.metric("vllm:inter_token_latency_seconds_count", model="demo") > 0


def test_prefix_hits_are_counted(server: Server) -> None:
    before = server.metric("vllm:prefix_cache_hits_total", model="demo")
    for _ in range(2):
        Call(server, text_input=PROMPT * 4, sampling_parameters=FIELDS).all()
    wait_until(
        lambda: server.metric("vllm:prefix_cache_hits_total", model="demo") > before, "the second prompt hits", 10.0
    )


def test_gauges_show_the_pool_and_go_back_to_zero(server: Server) -> None:
    # block 0 is kept for padding; gauges are written half a second after the server is ready
    wait_until(lambda: server.metric("vllm:kv_cache_blocks_total", model="demo") == 95, "the pool is shown", 10.0)
    call = Call(server, text_input=PROMPT, stream=True, max_tokens=600, parameters={"ignore_eos": True})
    call.next()
    wait_until(lambda: server.metric("vllm:num_requests_running", model="demo") == 1, "it runs", 10.0)
    assert 0 < server.metric("vllm:kv_cache_usage_perc", model="demo") <= 1
    call.cancel()
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_blocks_used"):
        wait_until(lambda name=name: server.metric(name, model="demo") == 0, f"{name} is 0", 10.0)


def test_every_series_has_the_labels_of_vllms_dashboards(server: Server) -> None:
    Call(server, text_input=PROMPT, sampling_parameters=FIELDS).all()
    for name in sorted(VLLM_NAMES - {"vllm:num_requests_waiting_by_reason"}):
        found = [f"{name}{kind}" for kind in ("", "_count") if f"\n{name}{kind}{{" in server.metrics_page()]
        assert found, name
    labels = {"model": "demo", "model_name": "demo", "engine": "0"}
    for name in ("queue", "prefill", "decode", "inference"):
        wait_until(lambda name=name: server.metric(f"vllm:request_{name}_time_seconds_count", **labels) > 0, name, 10.0)
    wait_until(lambda: server.metric("vllm:iteration_tokens_total_count", **labels) > 0, "steps are counted", 10.0)
    assert server.metric("vllm:cache_config_info", num_gpu_blocks="95", block_size="16", **labels) == 1


def test_an_unloaded_models_series_go(server: Server, models: Path, checkpoint: Path) -> None:
    repository.write_llm(models, "passing", {"model": str(checkpoint), "cache.num_blocks": "16"})
    assert server.load("passing") is None
    Call(server, "passing", text_input=PROMPT, sampling_parameters=FIELDS).all()
    wait_until(lambda: server.metric("vllm:generation_tokens_total", model="passing") == 12, "it is counted", 10.0)
    server.unload("passing")

    def left() -> list[str]:
        ours = re.findall(r"^(?:vllm|nereid):.*$", server.metrics_page(), re.MULTILINE)
        return [line for line in ours if 'model="passing"' in line]

    wait_until(lambda: not left(), "its series go")
    assert server.metric("vllm:kv_cache_blocks_total", model="demo") == 95
