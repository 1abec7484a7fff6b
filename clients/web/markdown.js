// A model's Markdown as DOM nodes. Three walls stand before its HTML: markdown-it escapes it, DOMPurify takes out all but
// the tags below, and the page's Content-Security-Policy runs no script that is not a file of the server.

import DOMPurify from "./vendor/purify.mjs";
import hljs from "./vendor/highlight.mjs";
import MarkdownIt from "./vendor/markdown-it.mjs";
import { copyText, make } from "./dom.js";

const TAGS = ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
  "s", "span", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul"];
const ATTRIBUTES = ["class", "href", "start"];
const LONGEST_HIGHLIGHTED = 50_000; // characters: a grammar's expressions may take long on more

// Pictures are links: a picture of another server would tell that server what was said.
const markdown = new MarkdownIt({ html: false, linkify: true, highlight }).disable("image");
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
for (const cell of ["th_open", "td_open"]) {
  markdown.renderer.rules[cell] = (tokens, index) => {
    const side = /right|center/.exec(tokens[index].attrGet("style") || "");
    return `<${tokens[index].tag}${side ? ` class="${side[0]}"` : ""}>`;
  };
}

function highlight(code, language) {
  if (!language || !hljs.getLanguage(language) || code.length > LONGEST_HIGHLIGHTED) return "";
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}

/** The nodes of `text`, none of which can run anything. */
export function render(text) {
  const fragment = DOMPurify.sanitize(markdown.render(text), {
    ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ATTRIBUTES, ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true,
  });
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const block of fragment.querySelectorAll("pre")) withHead(block);
  for (const table of fragment.querySelectorAll("table")) {
    const box = make("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(box);
    box.append(table);
  }
  return fragment;
}

function withHead(block) {
  const language = /language-(\S+)/.exec(block.firstElementChild?.className || "")?.[1] || "text";
  const box = make("div", { class: "code" }, make("div", { class: "code-head" }, make("span", {}, language),
    make("button", { type: "button", class: "copy-code", "aria-label": `Copy the ${language}` }, "Copy")));
  block.replaceWith(box);
  block.tabIndex = 0;
  box.append(block);
}

/** Show `text` in `box`. Blocks that did not change stay the same nodes, so a selection in them survives a stream. */
export function renderInto(box, text) {
  const fresh = [...render(text).childNodes];
  const old = [...box.childNodes];
  let same = 0;
  while (same < old.length && same < fresh.length && old[same].isEqualNode(fresh[same])) same++;
  old.slice(same).forEach((node) => node.remove());
  box.append(...fresh.slice(same));
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.(".copy-code");
  if (!button || !(await copyText(button.closest(".code").querySelector("pre").textContent, "Code"))) return;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
});
