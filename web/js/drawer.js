// What stands beside a view: a column where there is room, else behind a button.

import { el } from "./dom.js";

/** `side` beside `main`. `close` shows `main` again on a narrow screen, `title` says there what is chosen. */
export function drawer(label, side, main, props = {}) {
  const name = el("span", { class: "drawer-title" });
  const button = el("button", { type: "button", class: "drawer-button", "aria-expanded": "false", on: { click: () => set(!node.classList.contains("open")) } },
    el("span", { "aria-hidden": "true" }, "☰"), el("span", { i18n: label }), name);
  const node = el("div", { class: "split", ...props }, button, side, main);

  function set(open) {
    node.classList.toggle("open", open);
    button.setAttribute("aria-expanded", String(open));
  }

  return { node, open: () => set(true), close: () => set(false), title: (text) => { name.textContent = text; } };
}
