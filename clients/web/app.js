// The chat page: which conversation is shown, and what its buttons do.

import { stream } from "./answer.js";
import { models } from "./api.js";
import { $, announce, copyText, make, toast } from "./dom.js";
import { watch } from "./gauges.js";
import { alt, ctrl, ctrlShift, listen } from "./keyboard.js";
import { drawMessage, updateMessage } from "./messages.js";
import { openSettings, panels } from "./panels.js";
import { chosen, drawSettings } from "./settings.js";
import { sidebar } from "./sidebar.js";
import * as store from "./store.js";
import { addNode, branchOff, choose, newConversation, openCalls, path, removeLeaf, siblings, toMessages } from "./tree.js";

const withMouse = matchMedia("(hover: hover)"); // a phone's keyboard would cover what is shown
const MOST_ANSWERS = 128; // to one request, the API's bound
const HINTS = ["What does a list hold?", "How do I open a file?", "What is a thread?"];

let conversations = []; // those with messages, the newest first
let current = newConversation();
const live = new Map(); // id of a conversation to {nodes, controller} of the answers that are being written in it

// ---- models ----

async function loadModels() {
  const select = $("model");
  try {
    const names = (await models()).map((model) => model.id);
    const wanted = select.value || localStorage.getItem("model");
    select.replaceChildren(...names.map((name) => new Option(name, name, false, name === wanted)));
    if (names.length === 0) throw new Error("no model is ready");
  } catch (error) {
    select.replaceChildren(new Option(error.status === 401 ? "an API key is needed" : error.message, ""));
    if (error.status === 401) openSettings("key");
    else setTimeout(loadModels, 3000);
  }
}

// ---- what is shown ----

const boxOf = (node) => $("messages").querySelector(`[data-id="${node.id}"]`);

function draw() {
  const shown = path(current);
  const writing = live.get(current.id);
  $("messages").replaceChildren(...shown.map((node) => drawMessage(current, node, actions)));
  for (const node of writing?.nodes ?? []) if (boxOf(node)) updateMessage(boxOf(node), node, true);
  $("empty").hidden = shown.length > 0;
  document.title = shown.length ? `${current.title} – Nereid` : "Nereid";
  sessionStorage.setItem("current", current.id);
  drawState();
  drawList();
  $("log").scrollTop = $("log").scrollHeight;
}

function drawState() {
  const writing = live.has(current.id);
  const [call] = openCalls(current);
  $("send").hidden = $("send").disabled = writing;
  $("stop-button").hidden = !writing;
  $("text").placeholder = call && !writing ? `Result of ${call.function.name}` : "Write a message";
}

function showError(sentence) {
  $("messages").append(make("div", { class: "message" }, make("p", { class: "error", role: "alert" }, sentence)));
  $("log").scrollTop = $("log").scrollHeight;
}

/** Returns a function that draws the one of `nodes` that is shown, at most once a frame, and long texts less often than they take. */
function drawer(conversation, nodes) {
  let asked = false, rest = 0;
  const show = () => {
    asked = false;
    const node = conversation === current && live.has(conversation.id) && nodes.find(boxOf);
    if (!node) return;
    const log = $("log");
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 120;
    const began = performance.now();
    updateMessage(boxOf(node), node, true);
    rest = performance.now() + 3 * (performance.now() - began);
    if (follow) log.scrollTop = log.scrollHeight;
  };
  return () => {
    if (asked) return;
    asked = true;
    const wait = rest - performance.now();
    if (wait > 0) setTimeout(() => requestAnimationFrame(show), wait); // the stream may pause behind this piece
    else requestAnimationFrame(show);
  };
}

// ---- saying and answering ----

async function keep(conversation) {
  conversation.updated = Date.now();
  conversations = [conversation, ...conversations.filter((other) => other !== conversation)];
  for (const old of conversations.splice(store.MOST_CONVERSATIONS)) await store.remove(old.id);
  try {
    await store.save(conversation);
  } catch (error) {
    toast(error.message);
  }
}

async function forget(conversation) {
  live.get(conversation.id)?.controller.abort();
  conversations = conversations.filter((other) => other !== conversation);
  await store.remove(conversation.id);
  if (conversation === current) current = newConversation();
  draw();
}

/**
 * Answer `parent`, the last message; of `n` answers each is a version, and the first is shown. When nothing comes, `before`
 * is the leaf again. said: the message is new, and goes back into the box then.
 */
async function answer(conversation, parent, before, said) {
  const controller = new AbortController();
  const model = $("model").value;
  const nodes = [];
  let came = [], failure = null;
  try {
    const { system, body } = chosen();
    const messages = toMessages(conversation, parent.id, system);
    for (let left = answersOf(body); left > 0; left--) nodes.push(addNode(conversation, parent.id, { role: "assistant", model }));
    conversation.leaf = nodes[0].id;
    conversation.model = model;
    live.set(conversation.id, { nodes, controller });
    await keep(conversation);
    if (conversation === current) draw();
    announce(`${model} is answering.`);
    came = await stream(nodes, { model, messages, ...body }, controller.signal, drawer(conversation, nodes));
  } catch (error) {
    failure = error;
  }
  live.delete(conversation.id);
  const shown = [parent, ...nodes].some((node) => node.id === conversation.leaf); // else another version is read meanwhile
  for (const node of nodes) if (!came.includes(node)) removeLeaf(conversation, node);
  if (!came.length) {
    if (said) takeBack(conversation, parent);
    if (shown && conversation.nodes[before]) conversation.leaf = before;
  }
  if (!conversations.includes(conversation)) { // deleted meanwhile, or nothing was ever said in it
    if (came.length || Object.keys(conversation.nodes).length) return;
  }
  if (Object.keys(conversation.nodes).length) await keep(conversation);
  else { // it is shown still, and is not a conversation yet
    conversations = conversations.filter((other) => other !== conversation);
    await store.remove(conversation.id);
  }
  if (conversation !== current) return drawList();
  const follow = $("log").scrollHeight - $("log").scrollTop - $("log").clientHeight < 160;
  const place = $("log").scrollTop;
  draw();
  if (!follow) $("log").scrollTop = place;
  if (failure) showError(failure.message);
  else if (came.length) announce(`${came.length > 1 ? `The first of ${came.length} answers` : "The answer"}: ${came[0].content.slice(0, 2000)}`);
  return undefined;
}

/** How many answers a request asks for; what is no such number the server refuses. */
const answersOf = ({ n }) => (Number.isInteger(n) && n > 0 && n <= MOST_ANSWERS ? n : 1);

// Else every later message would be refused with it.
function takeBack(conversation, parent) {
  removeLeaf(conversation, parent);
  if (conversation === current && !$("text").value) $("text").value = parent.content;
  fit();
}

function say(text, parent = current.leaf) {
  const conversation = current;
  if (live.has(conversation.id)) return;
  try {
    const before = conversation.leaf;
    const [call, ...more] = parent === before ? openCalls(conversation) : [];
    const node = addNode(conversation, parent, call ? { role: "tool", content: text, call_id: call.id, name: call.function.name } : { role: "user", content: text });
    if (more.length) keep(conversation).then(draw);
    else answer(conversation, node, before, true);
  } catch (error) {
    toast(error.message);
  }
}

const actions = {
  choose(node) {
    choose(current, node);
    keep(current);
    draw();
  },
  again(node) {
    if (live.has(current.id)) return toast("An answer is being written. Stop it first.");
    const before = current.leaf;
    current.leaf = node.parent;
    answer(current, current.nodes[node.parent], before, false);
    return undefined;
  },
  async branch(node) {
    current = branchOff(current, node);
    await keep(current);
    draw();
    toast("This is a new conversation with the messages so far.");
  },
  edit(node) {
    if (live.has(current.id)) return toast("An answer is being written. Stop it first.");
    const box = boxOf(node);
    const area = make("textarea", { rows: 4, "aria-label": "Edit the message" });
    area.value = node.content;
    const send = () => area.value.trim() && say(area.value.trim(), node.parent);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
      if (event.key === "Escape") { event.stopPropagation(); draw(); }
    });
    box.querySelector(".what").replaceChildren(area, make("div", { class: "editing" },
      make("button", { type: "button", onclick: draw }, "Cancel"), make("button", { type: "button", class: "accent", onclick: send }, "Send")));
    area.focus();
    return undefined;
  },
};

const drawList = sidebar({
  all: () => conversations,
  current: () => current,
  open: show,
  rename(conversation, title) {
    Object.assign(conversation, { title, named: true });
    store.save(conversation).catch((error) => toast(error.message));
    draw();
  },
  remove: forget,
  async removeAll() {
    live.forEach(({ controller }) => controller.abort());
    conversations = [];
    await store.removeAll();
    fresh();
  },
  async add(conversation) {
    await begun;
    await keep(conversation);
    show(conversation);
  },
});

function show(conversation) {
  current = conversation;
  if (conversation.model && [...$("model").options].some((option) => option.value === conversation.model)) $("model").value = conversation.model;
  closeOnPhone();
  draw();
}

function fresh() {
  current = newConversation($("model").value);
  closeOnPhone();
  draw();
  $("text").focus();
}

function step(by) {
  const next = conversations[Math.max(0, Math.min(conversations.length - 1, conversations.indexOf(current) + by))];
  if (next) show(next);
}

const lastOf = (role) => path(current).filter((node) => node.role === role).pop();

// ---- the message box ----

function fit() {
  const box = $("text");
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight + 2, window.innerHeight * 0.4)}px`;
}

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  await begun;
  const text = $("text").value.trim();
  if (!text || live.has(current.id)) return;
  $("text").value = "";
  fit();
  say(text);
});
$("text").addEventListener("input", fit);
$("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  } else if (event.key === "ArrowUp" && !$("text").value && lastOf("user")) {
    event.preventDefault();
    actions.edit(lastOf("user"));
  }
});
async function ask(hint) {
  await begun;
  say(hint);
  if (withMouse.matches) $("text").focus(); // the button is gone
}

$("stop-button").addEventListener("click", () => live.get(current.id)?.controller.abort());
$("clear").addEventListener("click", fresh);
$("model").addEventListener("change", () => localStorage.setItem("model", $("model").value));
$("hints").append(...HINTS.map((hint) => make("li", {}, make("button", { type: "button", onclick: () => ask(hint) }, hint))));

const { closeOnPhone, openSidebar, closePanels } = panels();
listen([
  { keys: ["Enter"], says: "send" },
  { keys: ["Shift", "Enter"], says: "new line" },
  { keys: ["↑"], says: "in an empty message box: edit the last message" },
  { keys: ["Esc"], says: "stop the answer, or close a panel", test: (event) => event.key === "Escape", run: () => (live.has(current.id) ? $("stop-button").click() : closePanels()) },
  { keys: ["Ctrl", "Shift", "O"], says: "new chat", test: ctrlShift("o"), run: fresh },
  { keys: ["Ctrl", "K"], says: "search conversations", test: ctrl("k"), run: () => { openSidebar(); $("search").focus(); } },
  { keys: ["Alt", "↑"], says: "newer conversation", test: alt("ArrowUp"), run: () => step(-1) },
  { keys: ["Alt", "↓"], says: "older conversation", test: alt("ArrowDown"), run: () => step(1) },
  { keys: ["Alt", "R"], says: "answer again", test: alt("r"), run: () => lastOf("assistant") && actions.again(lastOf("assistant")) },
  { keys: ["Alt", "C"], says: "copy the last answer", test: alt("c"), run: () => lastOf("assistant") && copyText(lastOf("assistant").content, "Answer") },
  { keys: ["Alt", "←"], says: "version before of the last answer", test: alt("ArrowLeft"), run: () => turn(-1) },
  { keys: ["Alt", "→"], says: "version after", test: alt("ArrowRight"), run: () => turn(1) },
  { keys: ["Ctrl", ","], says: "settings", test: ctrl(","), run: () => openSettings("system") },
  { keys: ["Ctrl", "M"], says: "message box", test: ctrl("m"), run: () => $("text").focus() },
  { keys: ["Ctrl", "/"], says: "this list", test: ctrl("/"), run: () => $("help").showModal() },
]);

function turn(by) {
  const last = lastOf("assistant");
  if (!last) return;
  const versions = siblings(current, last);
  const next = versions[versions.indexOf(last) + by];
  if (next) actions.choose(next);
}

/** Show what the server and the browser hold. What is said before is said behind it: it needs a model and a conversation. */
async function begin() {
  await loadModels();
  conversations = await store.load();
  if (!store.isKept()) toast("This browser keeps nothing for this page: conversations end with the tab.");
  const before = conversations.find((one) => one.id === sessionStorage.getItem("current"));
  if (before && !path(current).length) show(before);
  else draw();
}

drawSettings(loadModels);
const begun = begin();
await begun;
if (withMouse.matches && document.activeElement === document.body) $("text").focus();
watch();
