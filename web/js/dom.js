// Builds elements from plain values. Text only ever enters the page as text.

import { t } from "./i18n.js";

/**
 * Make an element. `i18n` names its text, `label` its accessible name and tooltip, `hint` its placeholder: all three follow the
 * language. `on` holds listeners; `class` and all the rest are attributes, and false or null leaves one out.
 */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (key === "i18n") node.dataset.i18n = value;
    else if (key === "label") node.dataset.i18nLabel = value;
    else if (key === "hint") node.dataset.i18nHint = value;
    else if (key === "value") node.value = value;
    else if (key === "checked") node.checked = value;
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  translateOne(node);
  return node;
}

function translateOne(node) {
  if (node.dataset?.i18n) node.textContent = t(node.dataset.i18n);
  if (node.dataset?.i18nLabel) {
    node.setAttribute("aria-label", t(node.dataset.i18nLabel));
    node.title = t(node.dataset.i18nLabel);
  }
  if (node.dataset?.i18nHint) node.setAttribute("placeholder", t(node.dataset.i18nHint));
}

/** Put every named text below `root` into the language of now. */
export function translate(root = document) {
  for (const node of root.querySelectorAll("[data-i18n],[data-i18n-label],[data-i18n-hint]")) translateOne(node);
}

/** A labelled field. */
export function field(name, control, props = {}) {
  return el("label", { class: "field", ...props }, el("span", { i18n: name }), control);
}

export function toast(text, kind = "info") {
  const note = el("div", { class: `toast ${kind}` }, text);
  document.getElementById("toasts").append(note);
  setTimeout(() => note.remove(), kind === "error" ? 8000 : 3000);
}

/** Open the page's dialog with `body`; resolves with what `close(value)` is called with, or null. */
export function openDialog(titleKey, build) {
  const dialog = document.getElementById("dialog");
  return new Promise((resolve) => {
    let answer = null;
    const close = (value) => {
      answer = value;
      dialog.close();
    };
    const head = el("div", { class: "dialog-head" }, el("h2", { id: "dialog-title", i18n: titleKey }), el("button", { type: "button", class: "quiet", label: "close", on: { click: () => close(null) } }, "✕"));
    dialog.replaceChildren(head, ...[build(close)].flat());
    dialog.addEventListener("close", () => resolve(answer), { once: true });
    if (!dialog.open) dialog.showModal();
  });
}

export function confirmDialog(titleKey, text) {
  return openDialog(titleKey, (close) => [
    el("p", {}, text),
    el("div", { class: "row end" },
      el("button", { type: "button", i18n: "cancel", on: { click: () => close(false) } }),
      el("button", { type: "button", class: "danger", i18n: "confirm", on: { click: () => close(true) } })),
  ]);
}

export function download(name, text, type = "application/x-ndjson") {
  const link = el("a", { href: URL.createObjectURL(text instanceof Blob ? text : new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

export async function copy(text) {
  await navigator.clipboard.writeText(text);
  toast(t("copied"));
}

/** The dialog that shows a command. */
export function showCommand(text) {
  return openDialog("curl", () => [el("pre", { class: "command", tabindex: 0 }, text),
    el("div", { class: "row end" }, el("button", { type: "button", i18n: "copy", on: { click: () => copy(text) } }))]);
}

/** Run `redraw`; the focus stays on what has the same `data-focus` afterwards, or the same `data-instead`. */
export function keepFocus(root, redraw) {
  const held = root.contains(document.activeElement) ? document.activeElement.dataset : {};
  redraw();
  if (!held.focus) return;
  const find = (name) => name && [...root.querySelectorAll("[data-focus]")].find((node) => node.dataset.focus === name && !node.disabled);
  (find(held.focus) ?? find(held.instead))?.focus({ preventScroll: true });
}

/** Put the caret there, unless that would open a keyboard on the screen. */
export function focusByMouse(input) {
  if (matchMedia("(pointer: fine)").matches) input.focus();
}

/** The language for figures and dates: the browser's, where it is a kind of the chosen one. */
function locale() {
  const { lang } = document.documentElement;
  return navigator.languages.find((name) => name.slice(0, 2) === lang.slice(0, 2)) ?? lang;
}

/** Bytes, for people. */
export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit++) bytes /= 1024;
  return `${number(bytes, bytes >= 100 || unit === 0 ? 0 : 1)} ${units[unit]}`;
}

export function number(value, digits = 0) {
  if (value === null || value === undefined || Number.isNaN(Number(value))) return "–";
  return Number(value).toLocaleString(locale(), { maximumFractionDigits: digits });
}

/** A point in time, given in seconds since 1970. */
export function date(seconds) {
  return new Date(seconds * 1000).toLocaleString(locale(), { dateStyle: "medium", timeStyle: "short" });
}
