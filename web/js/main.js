// The page: tabs, language, theme, the password dialog, and whether the server is well.

import { about } from "./about.js";
import { setAsk } from "./api.js";
import { el, openDialog, toast, translate } from "./dom.js";
import { language, setLanguage, t } from "./i18n.js";
import * as board from "./board.js";
import * as chat from "./chat.js";
import * as sessions from "./sessions.js";
import * as server from "./server.js";
import * as translation from "./translate.js";
import * as tree from "./tree.js";

const TABS = { chat, board, tree, translate: translation, sessions, server };
const THEME = "rwkv_batch.theme";
const view = document.getElementById("view");
const tabs = document.getElementById("tabs");
let shown = null;

function go(name) {
  if (location.hash === `#${name}`) show();
  else location.hash = name;
}

function show() {
  const name = location.hash.slice(1) in TABS ? location.hash.slice(1) : "chat";
  shown?.leave();
  const section = el("section", { id: `view-${name}`, class: `view view-${name}`, role: "tabpanel", "aria-labelledby": `tab-${name}` });
  view.replaceChildren(section);
  shown = TABS[name].build(section, { go });
  for (const tab of tabs.children) {
    const selected = tab.dataset.name === name;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
  }
  document.title = `${t(`tab_${name}`)} · rwkv_batch`;
}

function onKey(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const names = Object.keys(TABS);
  const at = names.indexOf(event.target.dataset.name);
  const next = names[(at + step + names.length) % names.length];
  go(next);
  document.getElementById(`tab-${next}`).focus();
}

function label() {
  const button = document.getElementById("language");
  button.textContent = t("language");
  button.setAttribute("aria-label", t("change_language"));
  const theme = document.getElementById("theme");
  theme.setAttribute("aria-label", t("theme"));
  theme.title = t("theme");
  theme.textContent = isDark() ? "☀" : "☾";
  tabs.setAttribute("aria-label", t("views"));
  translate();
  shown?.relabel();
}

function isDark() {
  return (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
}

function askForSecret(again) {
  return openDialog("password", (close) => {
    const input = el("input", { type: "password", label: "password", autocomplete: "current-password", autofocus: true, required: true });
    return [el("form", { on: { submit: (event) => { event.preventDefault(); close(input.value); } } },
      el("p", { i18n: again ? "wrong_password" : "needs_password" }), input, el("p", { class: "muted", i18n: "password_text" }),
      el("div", { class: "row end" }, el("button", { type: "submit", class: "primary", i18n: "unlock" })))];
  });
}

async function pulse() {
  const light = document.getElementById("pulse");
  let state = "unreachable";
  try {
    const { engine, model } = await (await fetch("/healthz", { cache: "no-store" })).json();
    state = engine === "ready" ? "engine_ready" : "engine_not_ready";
    document.getElementById("model").textContent = model;
  } catch {
    // the light says it
  }
  if (light.dataset.state !== state) {
    light.dataset.state = state;
    light.replaceChildren(el("span", { class: "pulse-text", i18n: state }));
  }
  setTimeout(pulse, document.hidden ? 15000 : 5000);
}

setAsk(askForSecret);
for (const name of Object.keys(TABS)) tabs.append(el("button", { type: "button", role: "tab", id: `tab-${name}`, "data-name": name, i18n: `tab_${name}`, "aria-controls": "view", on: { click: () => go(name), keydown: onKey } }));
document.getElementById("language").addEventListener("click", () => {
  setLanguage(language() === "zh" ? "en" : "zh");
  label();
});
document.getElementById("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  localStorage.setItem(THEME, document.documentElement.dataset.theme);
  label();
});
addEventListener("hashchange", show);
addEventListener("unhandledrejection", (event) => toast(event.reason?.message ?? t("failed"), "error"));
const theme = localStorage.getItem(THEME);
if (theme) document.documentElement.dataset.theme = theme;
show();
label();
pulse();
about().catch(() => {});
