"use strict";

const $ = (id) => document.getElementById(id);
let history = []; // "Clear" begins another; an answer under way still belongs to its own
let running = null; // the AbortController of the answer that is being written
let lastCount = null; // {time, tokens} of the gauge reading before

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function errorText(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}

// ---- models -------------------------------------------------------------------------------------------------------

async function loadModels() {
  const select = $("model");
  try {
    const response = await fetch("/v1/models", { headers: headers() });
    if (!response.ok) throw new Error(await errorText(response));
    const names = (await response.json()).data.map((model) => model.id);
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
    if (names.length === 0) select.add(new Option("no model is ready", ""));
  } catch (error) {
    select.replaceChildren(new Option(error.message, ""));
  }
}

// ---- messages -----------------------------------------------------------------------------------------------------

function addMessage(role) {
  const box = document.createElement("div");
  box.className = `message ${role}`;
  const who = document.createElement("div");
  who.className = "who";
  who.textContent = role === "user" ? "You" : $("model").value;
  const what = document.createElement("div");
  what.className = "what";
  box.append(who, what);
  $("log").append(box);
  scrollDown(true);
  return box;
}

function scrollDown(always) {
  const log = $("log");
  if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 120) log.scrollTop = log.scrollHeight;
}

function addFacts(box, text, kind) {
  const facts = document.createElement("div");
  facts.className = kind || "facts";
  facts.textContent = text;
  box.append(facts);
  scrollDown(false);
}

function addReasoning(box, text) {
  let details = box.querySelector("details.thinking");
  if (!details) {
    details = document.createElement("details");
    details.className = "thinking";
    const summary = document.createElement("summary");
    summary.textContent = "Thinking";
    details.append(summary, document.createTextNode(""));
    box.querySelector(".what").before(details);
  }
  details.lastChild.data += text;
}

// decoder: puts characters together that several tokens share; the last of them shows it.
function addToken(what, entry, decoder) {
  const probability = Math.exp(entry.logprob);
  const span = document.createElement("span");
  span.className = "token";
  span.textContent = entry.bytes ? decoder.decode(new Uint8Array(entry.bytes), { stream: true }) : entry.token;
  span.dataset.probability = probability.toFixed(4);
  span.style.background = `hsl(${Math.round(120 * probability)} 60% var(--token-light))`;
  const others = entry.top_logprobs.map((top) => `${JSON.stringify(top.token)} ${(100 * Math.exp(top.logprob)).toFixed(1)} %`);
  span.title = [`${(100 * probability).toFixed(1)} %`, ...others].join("\n");
  what.append(span);
}

// ---- one answer ---------------------------------------------------------------------------------------------------

function requestBody() {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const system = $("system").value.trim();
  return {
    model: $("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...history],
    temperature: number("temperature"),
    top_p: number("top_p"),
    top_k: number("top_k"),
    max_completion_tokens: number("max_tokens"),
    seed: number("seed"),
    stop: $("stop").value || undefined,
    stream: true,
    stream_options: { include_usage: true },
    ...($("logprobs").checked ? { logprobs: true, top_logprobs: 5 } : {}),
  };
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function answer() {
  const box = addMessage("assistant");
  const what = box.querySelector(".what");
  const conversation = history;
  const coloured = $("logprobs").checked;
  const decoder = new TextDecoder();
  const started = performance.now();
  let first = null, last = started, text = "", usage = null, finish = null;
  running = new AbortController();
  setRunning(true);
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), body: JSON.stringify(requestBody()), signal: running.signal,
    });
    if (!response.ok) throw new Error(await errorText(response));
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) usage = chunk.usage;
      const choice = chunk.choices[0];
      if (!choice) continue;
      last = performance.now();
      if (first === null) first = last;
      if (choice.delta.reasoning_content) addReasoning(box, choice.delta.reasoning_content);
      if (choice.delta.content) {
        text += choice.delta.content;
        if (!coloured) what.append(choice.delta.content);
      }
      if (coloured && choice.logprobs) choice.logprobs.content.forEach((entry) => addToken(what, entry, decoder));
      if (choice.finish_reason) finish = choice.finish_reason;
      scrollDown(false);
    }
  } catch (error) {
    if (error.name === "AbortError") finish = "stopped";
    else addFacts(box, error.message, "error");
  }
  running = null;
  setRunning(false);
  if (text) conversation.push({ role: "assistant", content: text });
  if (first === null) {
    const refused = conversation.pop(); // else every later message would be refused with it
    if (conversation === history && !$("text").value) $("text").value = refused.content;
    return;
  }
  const facts = [`first token ${(first - started).toFixed(0)} ms`];
  if (usage) {
    const seconds = (last - first) / 1000;
    facts.push(`${usage.completion_tokens} tokens`);
    if (usage.completion_tokens > 1 && seconds > 0) facts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
    facts.push(`prompt ${usage.prompt_tokens}, ${usage.prompt_tokens_details.cached_tokens} from cache`);
  }
  if (finish) facts.push(finish);
  addFacts(box, facts.join(" · "));
}

function setRunning(on) {
  $("send").disabled = on;
  $("stop-button").disabled = !on;
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || running) return;
  history.push({ role: "user", content: text });
  addMessage("user").querySelector(".what").textContent = text;
  $("text").value = "";
  answer();
});

$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});

$("stop-button").addEventListener("click", () => running && running.abort());

$("clear").addEventListener("click", () => {
  if (running) running.abort();
  history = [];
  $("log").replaceChildren();
});

// ---- gauges -------------------------------------------------------------------------------------------------------

function show(id, value) {
  $(id).textContent = value;
}

async function readGauges() {
  try {
    const response = await fetch("/stats", { headers: headers() });
    if (!response.ok) throw new Error(await errorText(response));
    const stats = await response.json();
    const model = $("model").value;
    const mine = stats.replicas.map((replica) => replica.models[model]).filter(Boolean);
    const sum = (name) => mine.reduce((total, gauges) => total + (gauges[name] || 0), 0);
    const kv = mine.length ? Math.max(...mine.map((gauges) => gauges.kv_usage || 0)) : 0;
    show("g-running", sum("running"));
    show("g-waiting", sum("waiting"));
    $("g-kv").value = kv;
    show("g-kv-text", `${(100 * kv).toFixed(0)} %`);
    show("g-preemptions", sum("preemptions"));
    const asked = sum("prefix_queries");
    show("g-hits", asked ? `${((100 * sum("prefix_hits")) / asked).toFixed(0)} %` : "–");
    const tokens = sum("generation_tokens");
    if (lastCount && stats.time > lastCount.time) {
      show("g-rate", Math.max(0, (tokens - lastCount.tokens) / (stats.time - lastCount.time)).toFixed(0));
    }
    if (!lastCount || stats.time > lastCount.time) lastCount = { time: stats.time, tokens };
    show("g-replicas", `${stats.replicas.filter((replica) => replica.ready).length} of ${stats.replicas.length}`);
  } catch {
    show("g-replicas", "no answer");
  }
}

$("key").value = sessionStorage.getItem("key") || "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("key", $("key").value);
  loadModels();
});

loadModels();
readGauges();
setInterval(() => document.hidden || readGauges(), 1000);
