// A conversation: a tree of messages, of which the page shows the path to one leaf. Editing a message or asking again
// adds a sibling, so nothing is lost.
//
// {id, title, named, model, created, updated, leaf, nodes: {id: node}}
// node: {id, parent, role, content, reasoning?, calls?, call_id?, name?, model?, facts?, tokens?}

export const MOST_MESSAGES = 2000;
const number = () => crypto.getRandomValues(new Uint32Array(3)).reduce((text, part) => text + part.toString(36), "");

export function newConversation(model) {
  const now = Date.now();
  return { id: number(), title: "New chat", named: false, model, created: now, updated: now, leaf: null, nodes: {} };
}

/** Add a message behind `parent` (null: as a first one) and show it. Throws when the conversation is full. */
export function addNode(conversation, parent, fields) {
  if (Object.keys(conversation.nodes).length >= MOST_MESSAGES) {
    throw new Error(`A conversation holds at most ${MOST_MESSAGES} messages. Begin a new one.`);
  }
  const node = { id: number(), parent, content: "", ...fields };
  conversation.nodes[node.id] = node;
  conversation.leaf = node.id;
  conversation.updated = Date.now();
  if (!conversation.named && Object.keys(conversation.nodes).length === 1) conversation.title = titleOf(node.content);
  return node;
}

export function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59)}…` : line || "New chat";
}

/** The messages that are shown, first to last. */
export function path(conversation, leaf = conversation.leaf) {
  const found = [];
  for (let id = leaf; id !== null && conversation.nodes[id]; id = conversation.nodes[id].parent) {
    found.push(conversation.nodes[id]);
  }
  return found.reverse();
}

/** The versions of a message: it and the others behind the same one. */
export function siblings(conversation, node) {
  return Object.values(conversation.nodes).filter((other) => other.parent === node.parent);
}

/** Show `node` and the newest messages behind it. */
export function choose(conversation, node) {
  const all = Object.values(conversation.nodes);
  let leaf = node;
  for (let next = leaf; next; next = all.filter((other) => other.parent === leaf.id).pop()) leaf = next;
  conversation.leaf = leaf.id;
}

/** Remove a message that has none behind it; where it was shown, another version is, or the message before. */
export function removeLeaf(conversation, node) {
  if (Object.values(conversation.nodes).some((other) => other.parent === node.id)) return;
  delete conversation.nodes[node.id];
  if (conversation.leaf !== node.id) return;
  const left = siblings(conversation, node).pop();
  if (left) choose(conversation, left);
  else conversation.leaf = node.parent;
}

/** A conversation of its own, with the messages up to `node`. */
export function branchOff(conversation, node) {
  const copy = newConversation(conversation.model);
  copy.title = titleOf(`${conversation.title} (branch)`);
  copy.named = true;
  for (const one of path(conversation, node.id)) copy.nodes[one.id] = structuredClone(one);
  copy.leaf = node.id;
  return copy;
}

/** The messages as the API takes them. With their thinking, of which the chat template shows the model what it is to see. */
export function toMessages(conversation, leaf, system) {
  const messages = path(conversation, leaf).map((node) => {
    if (node.role === "tool") return { role: "tool", tool_call_id: node.call_id, content: node.content };
    const message = { role: node.role, content: node.content };
    if (node.role === "assistant" && node.reasoning) message.reasoning_content = node.reasoning;
    return node.calls ? { ...message, content: node.content || null, tool_calls: node.calls.filter(Boolean) } : message;
  });
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

/** The calls at the end of what is shown that have no result yet. */
export function openCalls(conversation) {
  const shown = path(conversation);
  const answered = new Set();
  while (shown.length && shown[shown.length - 1].role === "tool") answered.add(shown.pop().call_id);
  const last = shown.pop();
  return (last?.calls || []).filter((call) => call && !answered.has(call.id));
}

export function toMarkdown(conversation) {
  const parts = path(conversation).map((node) => {
    const who = { user: "You", tool: `Result of ${node.name}` }[node.role] || node.model || "Assistant";
    const calls = (node.calls || []).map((call) => `\`\`\`json\n${JSON.stringify(call.function, null, 2)}\n\`\`\``);
    return [`## ${who}`, node.content, ...calls].filter(Boolean).join("\n\n");
  });
  return [`# ${conversation.title}`, ...parts].join("\n\n") + "\n";
}

/** A conversation out of a file, with what the page knows of it and nothing else. Throws an Error with a sentence. */
export function fromFile(given) {
  const wrong = (why) => new Error(`The file holds no conversation of this page: ${why}.`);
  const text = (value) => (typeof value === "string" ? value : undefined);
  const time = (value) => (Number.isFinite(value) ? value : Date.now());
  if (!given || typeof given !== "object" || !given.nodes || typeof given.nodes !== "object") throw wrong("`nodes` is missing");
  const entries = Object.entries(given.nodes);
  if (entries.length > MOST_MESSAGES) throw wrong(`it has more than ${MOST_MESSAGES} messages`);
  const conversation = newConversation(text(given.model));
  Object.assign(conversation, {
    title: titleOf(text(given.title) || ""), named: true, created: time(given.created), updated: time(given.updated),
  });
  const ids = new Map([[null, null]]); // the file's to ours
  for (const [old, node] of entries) {
    if (!node || !["user", "assistant", "tool"].includes(node.role)) throw wrong("a message has another role than user, assistant or tool");
    if (typeof node.content !== "string") throw wrong("the content of a message is no text");
    if (!ids.has(node.parent)) throw wrong("a message comes before the one that it answers");
    const id = number();
    ids.set(old, id);
    conversation.nodes[id] = {
      id, parent: ids.get(node.parent), role: node.role, content: node.content, reasoning: text(node.reasoning),
      calls: callsOf(node.calls), call_id: text(node.call_id), name: text(node.name), model: text(node.model), facts: text(node.facts),
    };
    conversation.leaf = id;
  }
  if (ids.has(given.leaf)) conversation.leaf = ids.get(given.leaf);
  return conversation;
}

function callsOf(calls) {
  if (!Array.isArray(calls)) return undefined;
  return calls.map((call) => ({
    id: String(call?.id), type: "function",
    function: { name: String(call?.function?.name), arguments: String(call?.function?.arguments) },
  }));
}
