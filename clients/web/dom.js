// Short names for what every module does to the document. Text goes in as text, never as HTML.

export const $ = (id) => document.getElementById(id);

/** make("p", {class: "soft", onclick: f}, "text", child, …): an element. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** A picture of the sprite in index.html. */
export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

/** A button that shows a picture and is called `label`. */
export function iconButton(name, label, onclick, extra = {}) {
  return make("button", { type: "button", class: "icon", "aria-label": label, title: label, onclick, ...extra }, icon(name));
}

/** One sentence at the foot of the page, with a button beside it where `action` is given: {label, run}. */
export function toast(sentence, action) {
  const box = $("toast");
  box.replaceChildren(make("span", {}, sentence));
  if (action) {
    box.append(make("button", { type: "button", onclick: () => { box.hidden = true; action.run(); } }, action.label));
  }
  box.append(iconButton("close", "Dismiss", () => { box.hidden = true; }));
  box.hidden = false;
  clearTimeout(toast.timer);
  toast.timer = setTimeout(() => { box.hidden = true; }, 12_000);
}

/** What a screen reader says once, when it is done with what it says now. */
export function announce(sentence) {
  $("status").textContent = sentence;
}

export async function copyText(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    announce(`${what} copied.`);
    return true;
  } catch {
    toast("The browser did not let the page copy: it allows that on https and on localhost only.");
    return false;
  }
}

export function download(name, type, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
