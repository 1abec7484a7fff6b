// One message of the conversation as an element: what was said, thinking, calls, tokens, facts, buttons.

import { copyText, iconButton, make } from "./dom.js";
import { renderInto } from "./markdown.js";
import { siblings } from "./tree.js";

const name = (node) => ({ user: "You", tool: `Result of ${node.name || "a tool"}` }[node.role] || node.model || "Assistant");

/** actions: {again, edit, branch, choose}, each called with the node. */
export function drawMessage(conversation, node, actions) {
  const who = make("h2", { class: "who" }, name(node));
  const box = make("article", { class: `message ${node.role}`, "data-id": node.id, "aria-label": name(node) }, who);
  if (node.role === "assistant") {
    box.append(
      make("details", { class: "thinking", hidden: true }, make("summary", {}, "Thinking"), make("div", {})),
      make("div", { class: "what" }), make("div", { class: "calls" }), make("p", { class: "facts" }), make("p", { class: "error" }));
    updateMessage(box, node);
  } else {
    const what = make("div", { class: "what" });
    what.textContent = node.content;
    box.append(what);
  }
  box.append(tools(conversation, node, actions));
  return box;
}

function tools(conversation, node, actions) {
  const bar = make("div", { class: "tools" });
  const versions = siblings(conversation, node);
  if (versions.length > 1) {
    const at = versions.indexOf(node);
    const turn = (by, picture, label) => iconButton(picture, label, () => actions.choose(versions[at + by]), { disabled: !versions[at + by] });
    bar.append(turn(-1, "left", "Version before"), make("span", { class: "versions" }, `${at + 1} of ${versions.length}`),
      turn(1, "right", "Version after"));
  }
  bar.append(iconButton("copy", "Copy", () => copyText(node.content, "Message")));
  if (node.role === "user") bar.append(iconButton("edit", "Edit", () => actions.edit(node)));
  if (node.role === "assistant") bar.append(iconButton("again", "Answer again", () => actions.again(node)));
  bar.append(iconButton("branch", "Branch into a new conversation", () => actions.branch(node)));
  return bar;
}

/** Show what has come since; live: more is to come. */
export function updateMessage(box, node, live = false) {
  box.classList.toggle("live", live);
  const thinking = box.querySelector(".thinking");
  thinking.hidden = !node.reasoning;
  if (node.reasoning) {
    thinking.firstChild.textContent = live && !node.content ? "Thinking…" : "Thinking";
    thinking.lastChild.textContent = node.reasoning;
  }
  const what = box.querySelector(".what");
  if (node.tokens) colour(what, node.tokens);
  else {
    what.classList.remove("coloured");
    renderInto(what, node.content);
  }
  box.querySelector(".calls").replaceChildren(...(node.calls || []).filter(Boolean).map(drawCall));
  box.querySelector(".facts").textContent = node.facts || "";
  box.querySelector(".error").textContent = node.error || "";
}

function drawCall(call) {
  let written = call.function.arguments;
  try {
    written = JSON.stringify(JSON.parse(written), null, 2);
  } catch { /* it is still being written */ }
  return make("details", { class: "call", open: true }, make("summary", {}, "Calls ", make("code", {}, call.function.name)), make("pre", { tabindex: "0" }, written));
}

// A character that several tokens share is shown by the last of them.
function colour(what, tokens) {
  if (!what.decoder || what.childElementCount > tokens.length) {
    what.replaceChildren();
    what.decoder = new TextDecoder();
    what.classList.add("coloured");
  }
  for (const entry of tokens.slice(what.childElementCount)) {
    const probability = Math.exp(entry.logprob);
    const others = entry.top.map(([token, logprob]) => `${JSON.stringify(token)} ${(100 * Math.exp(logprob)).toFixed(1)} %`);
    const span = make("span", {
      class: "token", "data-probability": probability.toFixed(4), title: [`${(100 * probability).toFixed(1)} %`, ...others].join("\n"),
    }, entry.bytes ? what.decoder.decode(new Uint8Array(entry.bytes), { stream: true }) : entry.token);
    span.style.background = `hsl(${Math.round(120 * probability)} 60% var(--token-light))`;
    what.append(span);
  }
}
