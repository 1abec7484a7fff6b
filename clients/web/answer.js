// The answers to one request: it, and its stream written into messages of the conversation.

import { ask, events, headers } from "./api.js";

const MOST_COLOURED = 4000; // tokens: a longer answer is shown without colours

/**
 * Stream each answer into the one of `nodes` that has its index. changed() is called after every piece. Returns those of
 * which something came; their `facts` say how fast. Throws an Error with a sentence when the request is refused; what breaks
 * off later stands in their `error`.
 */
export async function stream(nodes, body, signal, changed) {
  const started = performance.now();
  const clocks = nodes.map(() => ({ started, first: null, last: started, finish: null }));
  const begun = () => nodes.filter((_, index) => clocks[index].first !== null);
  let usage = null, stopped = false;
  try {
    const response = await ask("/v1/chat/completions", {
      method: "POST", headers: headers(), signal,
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    });
    for await (const chunk of events(response)) {
      if (chunk.usage) usage = chunk.usage;
      for (const choice of chunk.choices || []) {
        const node = nodes[choice.index], clock = clocks[choice.index];
        if (!node) continue;
        clock.last = performance.now();
        clock.first ??= clock.last;
        take(node, choice);
        clock.finish = choice.finish_reason ?? clock.finish;
      }
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") stopped = true;
    else if (!begun().length) throw error;
    else nodes.forEach((node, index) => { if (!clocks[index].finish) node.error = error.message; });
  }
  const whole = { first: Math.min(...clocks.map(({ first }) => first ?? Infinity)), last: Math.max(...clocks.map(({ last }) => last)) };
  const came = begun();
  for (const node of came) node.facts = facts(clocks[nodes.indexOf(node)], whole, usage, nodes.length, stopped);
  return came;
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

// Usage counts the tokens of all answers to a request together, and the rate is theirs.
function facts(clock, whole, usage, answers, stopped) {
  const found = [`first token ${(clock.first - clock.started).toFixed(0)} ms`];
  if (usage) {
    const seconds = (whole.last - whole.first) / 1000;
    const tokens = usage.completion_tokens;
    found.push((tokens === 1 ? "1 token" : `${tokens} tokens`) + (answers > 1 ? ` in ${answers} answers` : ""));
    if (tokens > 1 && seconds >= LEAST_TIMED_S) found.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    found.push(`prompt ${usage.prompt_tokens}, ${usage.prompt_tokens_details?.cached_tokens ?? 0} from cache`);
  }
  const finish = clock.finish ?? (stopped ? "stopped" : null);
  if (finish) found.push(FINISH[finish] ?? finish);
  return found.filter(Boolean).join(" · ");
}
