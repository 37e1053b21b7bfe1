// The chat: one path through a dialogue tree. Editing or regenerating makes a branch beside the old turn.

import { confirmDialog, copy, el, field, openDialog, toast } from "./dom.js";
import { t } from "./i18n.js";
import { turnView } from "./message.js";
import { samplingControls } from "./sampling.js";
import * as store from "./store.js";
import { command, run } from "./turn.js";

const running = new Map(); // node key -> AbortController, of all chats, whatever tab is open

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
  root.append(el("div", { class: "split chat" },
    el("aside", { class: "side", "aria-label": t("chats") },
      el("button", { type: "button", class: "wide", i18n: "new_chat", on: { click: () => { store.create(); input.focus(); } } }),
      list, sampling.node, el("details", { class: "sampling" }, el("summary", { i18n: "system" }), field("system", system))),
    el("section", { class: "talk" }, log, form)));

  function onKey(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (running.size === 0 || !active()) send();
    } else if (event.key === "Escape" && active()) {
      stop();
    }
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
    const controller = new AbortController();
    running.set(node.key, controller);
    store.changed();
    let due = false;
    await run(chat, node, sampling.values(), controller.signal, () => {
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
    running.delete(node.key);
    draw();
  }

  function edit(node) {
    editing = node;
    editNote.hidden = !node;
    if (node) {
      input.value = node.question;
      input.focus();
    }
  }

  function draw() {
    const chat = store.current();
    think.checked = chat?.think ?? false;
    if (document.activeElement !== system) system.value = chat?.system ?? "";
    list.replaceChildren(...store.all().map((other) => el("li", { class: other === chat ? "selected" : "" },
      el("button", { type: "button", class: "quiet name", "aria-current": other === chat, on: { click: () => store.select(other.id) } }, other.title || t("untitled")),
      el("button", { type: "button", class: "quiet", label: "delete", on: { click: () => drop(other) } }, "✕"))));
    const nodes = chat ? store.path(chat) : [];
    views.clear();
    log.replaceChildren(...(nodes.length ? nodes.map((node) => turn(chat, node)) : [welcome(chat)]));
    stopButton.hidden = !active();
    sendButton.hidden = Boolean(active());
    log.scrollTop = log.scrollHeight;
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
    const go = (step) => { chat.current = store.leaf(chat, beside[place + step].key); store.changed(); };
    const branches = beside.length > 1 && el("span", { class: "branches" },
      el("button", { type: "button", class: "quiet", label: "previous_branch", disabled: place === 0, on: { click: () => go(-1) } }, "‹"),
      `${place + 1} / ${beside.length}`,
      el("button", { type: "button", class: "quiet", label: "next_branch", disabled: place === beside.length - 1, on: { click: () => go(1) } }, "›"));
    view.root.append(el("div", { class: "actions" }, branches,
      el("button", { type: "button", class: "quiet", i18n: "regenerate", disabled: running.has(node.key), on: { click: () => start(chat, node.parent, node.question) } }),
      el("button", { type: "button", class: "quiet", i18n: "edit", on: { click: () => edit(node) } }),
      el("button", { type: "button", class: "quiet", i18n: "copy", on: { click: () => copy(node.answer) } })));
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
      await openDialog("curl", () => [el("pre", { class: "command", tabindex: 0 }, text), el("button", { type: "button", i18n: "copy", on: { click: () => copy(text) } })]);
    } catch (error) {
      toast(error.message, "error");
    }
  }

  draw();
  const forget = store.onChange(draw);
  return { leave: forget, relabel: draw };
}
