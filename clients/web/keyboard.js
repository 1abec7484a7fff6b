// Shortcuts. Each needs a modifier key or an empty message box, so that none fires while somebody writes.

import { $, make } from "./dom.js";

/** shortcuts: [{keys, says, test(event), run()}]. Writes the help dialog too. */
export function listen(shortcuts) {
  $("shortcuts").append(...shortcuts.flatMap(({ keys, says }) => [
    make("dt", {}, ...keys.flatMap((key, at) => (at ? [" ", make("kbd", {}, key)] : [make("kbd", {}, key)]))), make("dd", {}, says)]));
  $("open-help").addEventListener("click", () => $("help").showModal());
  document.addEventListener("keydown", (event) => {
    if (event.isComposing || document.querySelector("dialog[open]")) return;
    const found = shortcuts.find(({ test }) => test && test(event));
    if (!found) return;
    event.preventDefault();
    found.run();
  });
}

const command = (event) => event.ctrlKey || event.metaKey;
export const ctrl = (key) => (event) => command(event) && !event.shiftKey && !event.altKey && event.key.toLowerCase() === key;
export const ctrlShift = (key) => (event) => command(event) && event.shiftKey && event.key.toLowerCase() === key;
// A Mac writes another character with its option key: there the place of the key says which it is.
export const alt = (name) => (event) => event.altKey && !command(event) && (event.key === name || event.code === `Key${name.toUpperCase()}`);
