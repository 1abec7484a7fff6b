// The fields of a request that the page offers, kept in the browser. An empty field is not sent: the model's own default holds.

import { apiKey, setApiKey } from "./api.js";
import { $, make } from "./dom.js";

const FIELDS = [
  { id: "system", label: "System message", kind: "area", rows: 3 },
  { group: "Sampling", open: true },
  { id: "temperature", kind: "number", min: 0, max: 2, step: 0.1, start: "0.7", help: "0 always takes the likeliest token" },
  { id: "max_tokens", label: "Longest answer, tokens", field: "max_completion_tokens", kind: "number", min: 1, step: 1, start: "1024" },
  { id: "top_p", label: "Top p", kind: "number", min: 0.01, max: 1, step: 0.01, help: "draws from the likeliest tokens that together have this probability" },
  { id: "top_k", label: "Top k", kind: "number", min: 0, step: 1, help: "draws from this many of the likeliest tokens; 0 is all" },
  { id: "min_p", label: "Min p", kind: "number", min: 0, max: 1, step: 0.01, help: "leaves out tokens less likely than this share of the likeliest" },
  { id: "seed", kind: "number", step: 1, hint: "random" },
  { id: "n", label: "Answers to one message", kind: "number", min: 1, max: 128, step: 1, hint: "1", help: "they come at the same time, as versions of one answer" },
  { id: "stop", label: "Stop texts, one a line", kind: "area", rows: 2, read: lines },
  { id: "include_stop_str_in_output", label: "Keep the stop text in the answer", kind: "check" },
  { group: "Penalties and lengths" },
  { id: "presence_penalty", label: "Presence penalty", kind: "number", min: -2, max: 2, step: 0.1 },
  { id: "frequency_penalty", label: "Frequency penalty", kind: "number", min: -2, max: 2, step: 0.1 },
  { id: "repetition_penalty", label: "Repetition penalty", kind: "number", min: 0.01, max: 100, step: 0.05 },
  { id: "min_tokens", label: "Shortest answer, tokens", kind: "number", min: 0, step: 1 },
  { id: "ignore_eos", label: "Go on past the end token", kind: "check" },
  { group: "Beam search" },
  { id: "use_beam_search", label: "Search by beams", kind: "check", help: "gives the likeliest answers; as many beams as answers" },
  { id: "length_penalty", label: "Length penalty", kind: "number", min: -10, max: 10, step: 0.1, help: "above 0 favours longer answers" },
  { id: "early_stopping", label: "Stop when as many answers are complete", kind: "check" },
  { group: "Words and tokens" },
  { id: "bad_words", label: "Forbidden texts, one a line", kind: "area", rows: 2, read: lines },
  { id: "logit_bias", label: "Biases, token id to number (JSON)", kind: "area", rows: 2, hint: '{"42": -5}', read: json("The biases") },
  { id: "allowed_token_ids", label: "Only these token ids", kind: "text", hint: "all", read: ids("The allowed token ids") },
  { id: "stop_token_ids", label: "Stop at these token ids", kind: "text", hint: "1, 2", read: ids("The stop token ids") },
  { id: "show_special", label: "Show special tokens", kind: "check", read: () => ({ skip_special_tokens: false }) },
  { group: "Form of the answer" },
  { id: "thinking", label: "Thinking", kind: "choice", choices: { "": "As the model does", true: "On", false: "Off" }, read: thinking },
  { id: "thinking_token_budget", label: "Longest thinking, tokens", kind: "number", min: 0, step: 1 },
  { id: "reasoning_effort", label: "Reasoning effort", kind: "text", hint: "low, medium, high", help: "a variable of the chat template, where it knows it" },
  { id: "response_format", label: "JSON schema, or json_object", kind: "area", rows: 3, read: format },
  { id: "structured_outputs", label: "Other constraint (JSON)", kind: "area", rows: 2, hint: '{"regex": "[0-9]+"}', read: json("The constraint"), help: "regex, choice, grammar or structural_tag" },
  { id: "tools", label: "Tools (JSON list)", kind: "area", rows: 3, read: json("Tools") },
  { id: "logprobs", label: "Colour tokens by probability", kind: "check", read: () => ({ logprobs: true, top_logprobs: 5 }) },
  { group: "More" },
  { id: "more", label: "Further fields (JSON object)", kind: "area", rows: 3, hint: '{"priority": 1}', read: (text) => json("Further fields")(text, true) },
];
const REAL = FIELDS.filter((field) => field.id);

function parsed(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} under Settings cannot be read as JSON: ${error.message}.`);
  }
}

function json(name) {
  return (text, spread = false) => {
    const value = parsed(text, name);
    if (!spread) return value;
    if (value === null || typeof value !== "object" || Array.isArray(value)) throw new Error(`${name} under Settings must be a JSON object.`);
    return value;
  };
}

function lines(text) {
  return text.split("\n").filter(Boolean);
}

function ids(name) {
  return (text) => text.split(/[\s,]+/).filter(Boolean).map((word) => {
    if (!/^\d+$/.test(word)) throw new Error(`${name} under Settings are whole numbers; ${word} is none.`);
    return Number(word);
  });
}

function thinking(text) {
  return { chat_template_kwargs: { enable_thinking: text === "true" } };
}

function format(text) {
  if (text === "json_object") return { type: "json_object" };
  return { type: "json_schema", json_schema: { name: "answer", schema: parsed(text, "The JSON schema") } };
}

/** Which readers return fields by their names, to be spread into the request. */
const SPREAD = new Set(["thinking", "logprobs", "show_special", "more"]);

/** Write the form, with what was set before. `onkey` is called when the API key has changed. */
export function drawSettings(onkey) {
  const kept = JSON.parse(localStorage.getItem("settings") || "{}");
  let box = $("fields");
  for (const field of FIELDS) {
    if (field.group) {
      box = make("details", { open: field.open }, make("summary", {}, field.group));
      $("fields").append(box);
      continue;
    }
    const input = inputOf(field);
    const value = kept[field.id] ?? field.start ?? "";
    if (field.kind === "check") input.checked = value === "true";
    else input.value = value;
    input.addEventListener("input", keep);
    const name = field.label || field.id[0].toUpperCase() + field.id.slice(1);
    box.append(field.kind === "check" ? make("label", { class: "row" }, input, name) : make("label", {}, make("span", {}, name), input));
    if (field.help) {
      input.setAttribute("aria-describedby", `${field.id}-help`);
      box.append(make("p", { class: "soft", id: `${field.id}-help` }, field.help));
    }
  }
  const key = make("input", { id: "key", type: "password", autocomplete: "off", placeholder: "none", value: apiKey() });
  key.addEventListener("change", () => {
    setApiKey(key.value);
    onkey();
  });
  $("fields").append(make("label", {}, make("span", {}, "API key (kept until this tab closes)"), key),
    make("button", { type: "button", id: "reset", onclick: reset }, "Back to the defaults"));
}

function inputOf(field) {
  const shared = { id: field.id, placeholder: field.hint ?? (field.kind === "number" ? "default" : undefined) };
  if (field.kind === "area") return make("textarea", { ...shared, rows: field.rows, spellcheck: "false" });
  if (field.kind === "check") return make("input", { ...shared, type: "checkbox" });
  if (field.kind === "choice") {
    return make("select", { id: field.id }, ...Object.entries(field.choices).map(([value, text]) => new Option(text, value)));
  }
  if (field.kind === "text") return make("input", { ...shared, type: "text", autocomplete: "off", spellcheck: "false" });
  return make("input", { ...shared, type: "number", min: field.min, max: field.max, step: field.step });
}

const valueOf = (field) => (field.kind === "check" ? ($(field.id).checked ? "true" : "") : $(field.id).value.trim());

function keep() {
  localStorage.setItem("settings", JSON.stringify(Object.fromEntries(REAL.map((field) => [field.id, valueOf(field)]))));
}

function reset() {
  for (const field of REAL) {
    if (field.kind === "check") $(field.id).checked = false;
    else $(field.id).value = field.start ?? "";
  }
  keep();
}

/** {system, body}: the fields that are set. Throws an Error with a sentence when one cannot be read. */
export function chosen() {
  keep();
  const body = {};
  for (const field of REAL) {
    const text = valueOf(field);
    if (text === "" || field.id === "system") continue;
    const value = field.read ? field.read(text) : field.kind === "number" ? Number(text) : field.kind === "check" ? true : text;
    if (SPREAD.has(field.id)) Object.assign(body, value);
    else body[field.field || field.id] = value;
  }
  return { system: $("system").value.trim(), body };
}
