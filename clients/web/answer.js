// One answer: the request, and its stream written into a message of the conversation.

import { ask, events, headers } from "./api.js";

const MOST_COLOURED = 4000; // tokens: a longer answer is shown without colours

/**
 * Stream an answer into `node`. changed() is called after every piece. Returns true when something came, and then
 * node.facts says how fast. Throws an Error with a sentence when the request is refused; what breaks off later stands in node.error.
 */
export async function stream(node, body, signal, changed) {
  const started = performance.now();
  const clock = { started, first: null, last: started };
  let usage = null, finish = null;
  try {
    const response = await ask("/v1/chat/completions", {
      method: "POST", headers: headers(), signal,
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    });
    for await (const chunk of events(response)) {
      if (chunk.usage) usage = chunk.usage;
      const choice = (chunk.choices || []).find((one) => one.index === 0);
      if (!choice) continue;
      clock.last = performance.now();
      clock.first ??= clock.last;
      take(node, choice);
      if (choice.finish_reason) finish = choice.finish_reason;
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") finish = "stopped";
    else if (clock.first === null) throw error;
    else node.error = error.message;
  }
  if (clock.first === null) return false;
  node.facts = facts(clock, usage, finish);
  return true;
}

function take(node, { delta, logprobs }) {
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought) node.reasoning = (node.reasoning || "") + thought;
  if (delta.content) node.content += delta.content;
  for (const part of delta.tool_calls || []) {
    node.calls ??= [];
    const call = (node.calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (part.id) call.id = part.id;
    if (part.function?.name) call.function.name += part.function.name;
    if (part.function?.arguments) call.function.arguments += part.function.arguments;
  }
  if (logprobs?.content && !node.plain) {
    (node.tokens ??= []).push(...logprobs.content.map((entry) => ({
      token: entry.token, bytes: entry.bytes, logprob: entry.logprob, top: entry.top_logprobs.map((top) => [top.token, top.logprob]),
    })));
    if (node.tokens.length > MOST_COLOURED) {
      node.plain = true;
      delete node.tokens;
    }
  }
}

// Of what came at once the rate says nothing.
const LEAST_TIMED_S = 0.05;
const FINISH = { stop: "", length: "cut off: longest answer reached", tool_calls: "calls a tool" };

function facts(clock, usage, finish) {
  const found = [`first token ${(clock.first - clock.started).toFixed(0)} ms`];
  if (usage) {
    const seconds = (clock.last - clock.first) / 1000;
    const tokens = usage.completion_tokens;
    found.push(tokens === 1 ? "1 token" : `${tokens} tokens`);
    if (tokens > 1 && seconds >= LEAST_TIMED_S) found.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    found.push(`prompt ${usage.prompt_tokens}, ${usage.prompt_tokens_details?.cached_tokens ?? 0} from cache`);
  }
  if (finish) found.push(FINISH[finish] ?? finish);
  return found.filter(Boolean).join(" · ");
}
