// "Try it" of one operation: the request as it will be sent, and the answer as it arrives.

import { make } from "./dom.js";

const EXAMPLES = {
  "/v1/chat/completions": { messages: [{ role: "user", content: "How do I open a file?" }], max_tokens: 64, temperature: 0, stream: true },
  "/v1/completions": { prompt: "The queue module implements", max_tokens: 32, temperature: 0 },
  "/v1/responses": { input: "How do I open a file?", max_output_tokens: 64, temperature: 0 },
  "/v1/responses/input_tokens": { input: "How do I open a file?" },
  "/v1/messages": { messages: [{ role: "user", content: "How do I open a file?" }], max_tokens: 64 },
  "/v1/messages/count_tokens": { messages: [{ role: "user", content: "How do I open a file?" }] },
  "/tokenize": { prompt: "The queue module implements" },
  "/detokenize": { tokens: [10, 11, 12] },
  "/invocations": { prompt: "The queue module implements", max_tokens: 32, temperature: 0 },
};
const MOST_SHOWN = 200_000; // characters of an answer

/** A form for `method path`. model: the name that examples carry; key(): the API key. */
export function tryOut(method, path, spec, model, key) {
  const names = [...path.matchAll(/\{([^}:]+)[^}]*\}/g)].map((match) => match[1]);
  const places = names.map((name) => make("input", { "aria-label": name, placeholder: name, value: name === "model" ? model : undefined }));
  const example = EXAMPLES[path] && { model, ...EXAMPLES[path] };
  const body = spec.requestBody
    ? make("textarea", { rows: 8, spellcheck: "false", "aria-label": `Body of ${method} ${path}` }, JSON.stringify(example || {}, null, 2)) : null;
  const status = make("p", { class: "soft", role: "status" });
  const shown = make("pre", { tabindex: "0", "aria-label": "Answer", hidden: true });
  const send = make("button", { type: "submit", class: "accent" }, "Try it");
  const stop = make("button", { type: "button", hidden: true }, "Stop");
  const form = make("form", { class: "try" }, ...places, ...(body ? [body] : []), make("p", {}, send, " ", stop), status, shown);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const controller = new AbortController();
    stop.onclick = () => controller.abort();
    send.disabled = true;
    stop.hidden = false;
    shown.textContent = "";
    const began = performance.now();
    try {
      const url = names.reduce((text, name, at) => text.replace(new RegExp(`\\{${name}[^}]*\\}`), encodeURIComponent(places[at].value)), path);
      const headers = { ...(body && { "Content-Type": "application/json" }), ...(key() && { Authorization: `Bearer ${key()}` }) };
      const response = await fetch(url, { method: method.toUpperCase(), headers, body: body?.value, signal: controller.signal });
      shown.hidden = false;
      const whole = await read(response, shown);
      status.textContent = `${response.status} ${response.statusText}, ${(performance.now() - began).toFixed(0)} ms${whole ? "" : ", cut off here"}`;
    } catch (error) {
      status.textContent = error.name === "AbortError" ? "Stopped." : "The server cannot be reached.";
    }
    send.disabled = false;
    stop.hidden = true;
  });
  return form;
}

/** Write the answer as it comes, JSON in lines at its end. Returns false when it was too long. */
async function read(response, shown) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    shown.append(value);
    if (shown.textContent.length > MOST_SHOWN) {
      reader.cancel();
      return false;
    }
  }
  try {
    shown.textContent = JSON.stringify(JSON.parse(shown.textContent), null, 2);
  } catch { /* events or plain text: as they came */ }
  return true;
}
