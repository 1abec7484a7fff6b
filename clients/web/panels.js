// The two panels beside the conversation. On a wide window they stand beside it, and stay as they were left; on a narrow
// one they lie over it, one at a time, and begin closed.

import { $ } from "./dom.js";

const narrow = matchMedia("(max-width: 50rem)");
const PANELS = { sidebar: true, settings: false }; // open at the first visit of a wide window

function set(id, open, remember = true) {
  $(id).hidden = !open;
  $(`open-${id}`).setAttribute("aria-expanded", open);
  document.body.classList.toggle(`with-${id}`, open);
  if (narrow.matches && open) set(id === "sidebar" ? "settings" : "sidebar", false, false);
  else if (remember && !narrow.matches) localStorage.setItem(`panel-${id}`, open);
}

function begin() {
  for (const [id, open] of Object.entries(PANELS)) {
    set(id, !narrow.matches && (localStorage.getItem(`panel-${id}`) ?? String(open)) === "true", false);
  }
}

/** Show the settings, and go to one of them. */
export function openSettings(field) {
  set("settings", true);
  $(field).closest("details")?.setAttribute("open", "");
  $(field).focus();
}

export function panels() {
  begin();
  narrow.addEventListener("change", begin);
  for (const id of Object.keys(PANELS)) {
    $(`open-${id}`).addEventListener("click", () => {
      set(id, $(id).hidden);
      if (!$(id).hidden && narrow.matches) $(`close-${id}`).focus();
    });
    $(`close-${id}`).addEventListener("click", () => {
      set(id, false);
      $(`open-${id}`).focus();
    });
  }
  document.querySelector("main").addEventListener("click", (event) => { // beside an open panel
    const open = Object.keys(PANELS).some((id) => !$(id).hidden);
    if (!narrow.matches || !open || event.target.closest("[aria-controls]")) return;
    event.preventDefault();
    event.stopPropagation();
    closeAll();
  }, true);
  const closeAll = () => Object.keys(PANELS).forEach((id) => set(id, false));
  return {
    openSidebar: () => set("sidebar", true),
    closePanels: () => narrow.matches && closeAll(),
    closeOnPhone: () => narrow.matches && closeAll(),
  };
}
