// The shim's HTTP API: headers, models, server-sent events.

let key = sessionStorage.getItem("key") || "";

export const apiKey = () => key;

export function setApiKey(value) {
  key = value.trim();
  sessionStorage.setItem("key", key);
}

export function headers() {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

/** A failed answer as a sentence. */
export async function errorText(response) {
  let sentence = `The server answered ${response.status} ${response.statusText}`.trim() + ".";
  try {
    sentence = (await response.json()).error.message;
  } catch { /* it was no JSON: the status is all there is */ }
  if (response.status === 401) sentence += " Enter the API key under Settings.";
  return sentence;
}

/** fetch, with "the server is away" as a sentence. */
export async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { headers: headers(), ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server cannot be reached. Is `nereid openai` running?");
  }
  if (!response.ok) {
    const error = new Error(await errorText(response));
    error.status = response.status;
    throw error;
  }
  return response;
}

/** The cards of the models that are ready. */
export async function models() {
  return (await (await ask("/v1/models")).json()).data;
}

/** The JSON of each server-sent event until [DONE]. Throws an Error with the sentence of an error event. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (held + value).split("\n\n");
      held = parts.pop();
      for (const part of parts) {
        const data = part.replace(/^data: ?/, "");
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
