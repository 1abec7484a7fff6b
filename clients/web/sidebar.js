// The list of conversations: search, rename, export, import, delete.

import { $, download, iconButton, make, toast } from "./dom.js";
import { fromFile, toMarkdown } from "./tree.js";

const MOST_FILE_BYTES = 64 << 20;

/** actions: {all, current, open, rename, remove, restore, removeAll, add}. Returns draw(). */
export function sidebar(actions) {
  $("search").addEventListener("input", draw);
  $("export-all").addEventListener("click", () => download("nereid-conversations.json", "application/json",
    JSON.stringify({ nereid: 1, conversations: actions.all() }, null, 1)));
  $("import").addEventListener("click", () => $("import-file").click());
  $("import-file").addEventListener("change", async () => {
    const [file] = $("import-file").files;
    if (file) await read(file);
    $("import-file").value = "";
  });
  $("delete-all").addEventListener("click", () => {
    const count = actions.all().length;
    if (count === 0) return toast("There is no conversation to delete.");
    $("confirm-text").textContent = `Delete ${count === 1 ? "the conversation" : `all ${count} conversations`}? This cannot be undone.`;
    $("confirm").returnValue = "no";
    $("confirm").showModal();
    return undefined;
  });
  $("confirm").addEventListener("close", () => { if ($("confirm").returnValue === "yes") actions.removeAll(); });

  async function read(file) {
    try {
      if (file.size > MOST_FILE_BYTES) throw new Error("The file is larger than 64 MiB.");
      let given;
      try {
        given = JSON.parse(await file.text());
      } catch {
        throw new Error("The file cannot be read as JSON.");
      }
      const found = (Array.isArray(given?.conversations) ? given.conversations : [given]).map(fromFile);
      for (const one of found) await actions.add(one);
      toast(found.length === 1 ? "1 conversation was imported." : `${found.length} conversations were imported.`);
    } catch (error) {
      toast(error.message);
    }
  }

  function rename(conversation, item) {
    const input = make("input", { class: "rename", "aria-label": "Name of the conversation", maxlength: 80 });
    input.value = conversation.title;
    let open = true;
    const end = (keep) => {
      if (!open) return;
      open = false;
      if (keep && input.value.trim()) actions.rename(conversation, input.value.trim());
      draw();
      $("conversations").querySelector(`[data-id="${conversation.id}"] button`)?.focus();
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") { event.stopPropagation(); end(false); }
    });
    input.addEventListener("blur", () => end(true));
    item.replaceChildren(input);
    input.select();
  }

  async function remove(conversation) {
    await actions.remove(conversation);
    toast(`“${conversation.title}” was deleted.`, { label: "Undo", run: () => actions.add(conversation) });
  }

  function holds(conversation, words) {
    if (conversation.title.toLowerCase().includes(words)) return true;
    return Object.values(conversation.nodes).some((node) => node.content.toLowerCase().includes(words));
  }

  function drawItem(conversation) {
    const now = conversation === actions.current();
    const item = make("li", { "data-id": conversation.id });
    item.append(
      make("button", { type: "button", class: "title", "aria-current": now && "true", title: conversation.title, onclick: () => actions.open(conversation) }, conversation.title),
      iconButton("edit", `Rename ${conversation.title}`, () => rename(conversation, item)),
      iconButton("save", `Export ${conversation.title} as Markdown`, () => download("conversation.md", "text/markdown", toMarkdown(conversation))),
      iconButton("bin", `Delete ${conversation.title}`, () => remove(conversation)));
    return item;
  }

  function draw() {
    const words = $("search").value.trim().toLowerCase();
    const found = actions.all().filter((one) => !words || holds(one, words));
    $("conversations").replaceChildren(...found.map(drawItem));
    if (!found.length) $("conversations").append(make("li", { class: "soft" }, words ? "Nothing found." : "Nothing yet."));
  }
  return draw;
}
