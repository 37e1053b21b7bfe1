// The chat: one path through a dialogue tree. Editing or regenerating makes a branch beside the old turn.

import { confirmDialog, copy, el, field, focusByMouse, keepFocus, showCommand, toast } from "./dom.js";
import { drawer } from "./drawer.js";
import { t } from "./i18n.js";
import { turnView } from "./message.js";
import { samplingControls } from "./sampling.js";
import * as store from "./store.js";
import { command, run, running } from "./turn.js";

export function build(root) {
  const sampling = samplingControls();
  const list = el("ul", { class: "chats", label: "chats" });
  const log = el("div", { class: "log", role: "log", "aria-live": "polite", label: "conversation", tabindex: 0 });
  const input = el("textarea", { rows: 2, hint: "ask", label: "message", on: { keydown: onKey } });
  const sendButton = el("button", { type: "submit", class: "primary", i18n: "send" });
  const stopButton = el("button", { type: "button", class: "danger", i18n: "stop", hidden: true, on: { click: stop } });
  const think = el("input", { type: "checkbox", on: { change: () => setting("think", think.checked) } });
  const system = el("textarea", { rows: 2, hint: "system_hint", on: { change: () => setting("system", system.value) } });
  const views = new Map();
  let editing = null; // the parent of the next turn, when it is not the end of the path

  const editNote = el("div", { class: "note", hidden: true }, el("span", { i18n: "editing" }), el("button", { type: "button", class: "quiet", i18n: "cancel", on: { click: () => edit(null) } }));
  const form = el("form", { class: "composer", on: { submit: (event) => { event.preventDefault(); send(); } } },
    editNote, input, el("div", { class: "row end" },
      el("label", { class: "check" }, think, el("span", { i18n: "think" })),
      el("button", { type: "button", class: "quiet", i18n: "curl", on: { click: showCurl } }), stopButton, sendButton));
  const side = el("aside", { class: "side", label: "chats" },
    el("button", { type: "button", class: "wide", i18n: "new_chat", on: { click: () => { store.create(); lid.close(); input.focus(); } } }),
    list, sampling.node, el("details", { class: "sampling" }, el("summary", { i18n: "system" }), field("system", system)));
  const lid = drawer("chats", side, el("section", { class: "talk" }, log, form));
  root.append(lid.node);
  addEventListener("keydown", onEscape);

  function onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!active()) send();
    }
  }

  function onEscape(event) {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
  }

  function setting(name, value) {
    (store.current() ?? store.create())[name] = value;
    store.changed();
  }

  /** The node of the shown path that runs, if any. */
  function active() {
    const chat = store.current();
    return chat && store.path(chat).find((node) => running.has(node.key));
  }

  function stop() {
    const node = active();
    if (node) running.get(node.key).abort();
  }

  function send() {
    const question = input.value.trim();
    if (!question) return;
    const chat = store.current() ?? store.create();
    const parent = editing ? editing.parent : chat.current;
    input.value = "";
    edit(null);
    start(chat, parent, question);
  }

  async function start(chat, parent, question) {
    const node = store.addNode(chat, parent, question);
    chat.current = node.key;
    let due = false;
    const ended = run(chat, node, sampling.values(), () => {
      if (due) return;
      due = true;
      const pause = (node.answer.length + node.thought.length) / 200; // ms: parsing costs more the longer the text is
      setTimeout(() => requestAnimationFrame(() => {
        due = false;
        const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 80;
        views.get(node.key)?.update(running.has(node.key));
        if (atEnd) log.scrollTop = log.scrollHeight;
      }), pause);
    });
    store.changed();
    log.scrollTop = log.scrollHeight;
    await ended;
  }

  /** Once more from the same place: beside the old answer, or instead of one that never came. */
  function again(chat, node) {
    if (!node.answer && !node.thought && !store.children(chat, node.key).length) store.dropNode(chat, node);
    start(chat, node.parent, node.question);
  }

  function edit(node) {
    editing = node;
    editNote.hidden = !node;
    if (node) {
      input.value = node.question;
      input.focus();
    }
  }

  let drawn = null; // the end of the path on screen

  const draw = () => keepFocus(root, redraw);

  function redraw() {
    const chat = store.current();
    const place = log.scrollTop;
    think.checked = chat?.think ?? false;
    if (document.activeElement !== system) system.value = chat?.system ?? "";
    list.replaceChildren(...store.all().map((other) => el("li", { class: other === chat ? "selected" : "" },
      el("button", { type: "button", class: "quiet name", "aria-current": other === chat && "true", title: other.title, "data-focus": other.id, on: { click: () => { store.select(other.id); lid.close(); focusByMouse(input); } } }, other.title || t("untitled")),
      el("button", { type: "button", class: "quiet", label: "delete_chat_button", on: { click: () => drop(other) } }, "✕"))));
    const nodes = chat ? store.path(chat) : [];
    views.clear();
    log.replaceChildren(...(nodes.length ? nodes.map((node) => turn(chat, node)) : [welcome(chat)]));
    stopButton.hidden = !active();
    sendButton.hidden = Boolean(active());
    lid.title(chat?.title || t("untitled"));
    const end = `${chat?.id} ${chat?.current}`;
    log.scrollTop = end === drawn ? place : log.scrollHeight;
    drawn = end;
  }

  function welcome(chat) {
    const tries = ["try_1", "try_2", "try_3"].map((key) => el("button", { type: "button", i18n: key, on: { click: () => { input.value = t(key); send(); } } }));
    return el("div", { class: "welcome" }, el("h2", { i18n: "welcome" }), el("p", { class: "muted", i18n: chat?.base ? "resumed" : "welcome_text" }), el("div", { class: "row" }, tries));
  }

  function turn(chat, node) {
    const view = turnView(node, chat.think);
    views.set(node.key, view);
    view.update(running.has(node.key));
    const beside = store.children(chat, node.parent);
    const place = beside.indexOf(node);
    const go = (step) => {
      const next = beside[place + step].key;
      chat.current = store.leaf(chat, next);
      store.changed();
      views.get(next)?.root.scrollIntoView({ block: "nearest" });
    };
    const names = [`previous ${node.parent}`, `next ${node.parent}`];
    const branches = beside.length > 1 && el("span", { class: "branches" },
      el("button", { type: "button", class: "quiet", label: "previous_branch", "data-focus": names[0], "data-instead": names[1], disabled: place === 0, on: { click: () => go(-1) } }, "‹"),
      `${place + 1} / ${beside.length}`,
      el("button", { type: "button", class: "quiet", label: "next_branch", "data-focus": names[1], "data-instead": names[0], disabled: place === beside.length - 1, on: { click: () => go(1) } }, "›"));
    const failed = node.error && !node.answer && !node.thought;
    view.root.append(el("div", { class: "actions" }, branches,
      el("button", { type: "button", class: "quiet", i18n: failed ? "try_again" : "regenerate", disabled: running.has(node.key), on: { click: () => again(chat, node) } }),
      el("button", { type: "button", class: "quiet", i18n: "edit", on: { click: () => edit(node) } }),
      el("button", { type: "button", class: "quiet", i18n: "copy", disabled: !node.answer && !running.has(node.key), on: { click: () => copy(node.answer) } })));
    return view.root;
  }

  async function drop(chat) {
    if (!(await confirmDialog("delete_chat", chat.title || t("untitled")))) return;
    try {
      await store.remove(chat);
    } catch (error) {
      toast(error.message, "error");
    }
  }

  async function showCurl() {
    try {
      const chat = store.current() ?? store.create();
      const text = await command(chat, chat.current, input.value.trim() || t("try_1"), sampling.values());
      await showCommand(text);
    } catch (error) {
      toast(error.message, "error");
    }
  }

  draw();
  if (document.activeElement === document.body) focusByMouse(input);
  const forget = store.onChange(draw);
  return { leave: () => { forget(); removeEventListener("keydown", onEscape); }, relabel: draw };
}
