// A dialogue as the tree it is: branch anywhere, several at once, and compare the branches side by side.

import { el, field, keepFocus, showCommand, toast } from "./dom.js";
import { drawer } from "./drawer.js";
import { t } from "./i18n.js";
import { turnView } from "./message.js";
import { samplingControls } from "./sampling.js";
import * as store from "./store.js";
import { command, run, running } from "./turn.js";

const MOST = 16; // branches at once

export function build(root, { go }) {
  const sampling = samplingControls();
  const compared = new Set();
  let at = null; // key of the node that is continued; null: the beginning
  let chat = null;
  const views = new Map();

  const picker = el("select", { label: "chat", on: { change: () => store.select(picker.value) } });
  const tree = el("div", { class: "tree" });
  const columns = el("div", { class: "columns", tabindex: 0, role: "region", label: "compared" });
  const input = el("textarea", { rows: 2, hint: "branch_hint", label: "message", on: { keydown: onKey } });
  const stopButton = el("button", { type: "button", class: "danger", i18n: "stop", hidden: true, on: { click: stop } });
  const count = el("input", { type: "number", min: 1, max: MOST, value: 3, class: "narrow" });
  const where = el("p", { class: "muted" });
  const form = el("form", { class: "composer", on: { submit: (event) => { event.preventDefault(); branch(); } } },
    where, input, el("div", { class: "row end" }, field("branches", count),
      el("button", { type: "button", class: "quiet", i18n: "curl", on: { click: showCurl } }),
      stopButton, el("button", { type: "submit", class: "primary", i18n: "branch" })));
  const side = el("aside", { class: "side", label: "tab_tree" },
    el("div", { class: "row" }, picker, el("button", { type: "button", i18n: "new_chat", on: { click: () => { store.create(); lid.close(); } } })), tree, sampling.node);
  const lid = drawer("tab_tree", side, el("section", { class: "talk" }, columns, form), { class: "split dialogue" });
  root.append(lid.node);

  function onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    branch();
  }

  const live = () => Object.keys(chat?.nodes ?? {}).filter((key) => running.has(key));

  function stop() {
    for (const key of live()) running.get(key).abort();
  }

  async function branch() {
    const question = input.value.trim();
    const copies = Math.min(MOST, Math.max(1, Math.floor(Number(count.value)) || 1));
    if (!question) return;
    chat ??= store.create();
    input.value = "";
    compared.clear();
    const values = sampling.values();
    const nodes = Array.from({ length: copies }, () => store.addNode(chat, at, question));
    for (const node of nodes) compared.add(node.key);
    chat.current = nodes[0].key;
    nodes.forEach((node, index) => runOne(chat, node, values.seed === undefined ? values : { ...values, seed: values.seed + index }));
    store.changed();
  }

  function runOne(owner, node, values) {
    let due = false;
    run(owner, node, values, () => {
      if (due) return;
      due = true;
      setTimeout(() => {
        due = false;
        views.get(node.key)?.update(running.has(node.key));
      }, 60);
    });
  }

  const draw = () => keepFocus(root, redraw);

  function redraw() {
    const now = store.current();
    if (now !== chat) {
      chat = now;
      at = chat?.current ?? null;
      compared.clear();
      if (at) compared.add(at);
    }
    if (at && !chat?.nodes[at]) at = null;
    picker.replaceChildren(...store.all().map((other) => el("option", { value: other.id, selected: other === chat }, other.title || t("untitled"))));
    tree.replaceChildren(el("ul", {}, item(null)));
    stopButton.hidden = !live().length;
    lid.title(chat?.title || t("untitled"));
    where.textContent = at ? `${t("continues")} “${chat.nodes[at].question.slice(0, 80)}”` : t("continues_start");
    const shown = [...compared].filter((key) => chat?.nodes[key]);
    views.clear();
    columns.replaceChildren(...(shown.length ? shown.map(column) : [el("p", { class: "welcome muted", i18n: "tree_empty" })]));
  }

  function item(key) {
    const node = chat?.nodes[key];
    const below = chat ? store.children(chat, key) : [];
    const name = node ? node.question : t("beginning");
    const row = el("div", { class: `node${key === at ? " selected" : ""}` },
      node && el("input", { type: "checkbox", label: "compare", "data-focus": `compare ${key}`, checked: compared.has(key), on: { change: (event) => { event.target.checked ? compared.add(key) : compared.delete(key); draw(); } } }),
      el("button", { type: "button", class: "quiet name", "aria-current": key === at && "true", title: name, "data-focus": `node ${key}`, on: { click: () => pick(key) } },
        el("span", { class: "node-question" }, name),
        node && el("span", { class: "node-answer muted" }, running.has(key) ? "…" : node.answer.slice(0, 90))),
      node && node.idx !== null && el("span", { class: "muted badge" }, `#${node.idx}`));
    return el("li", {}, row, below.length ? el("ul", {}, below.map((child) => item(child.key))) : null);
  }

  function pick(key) {
    at = key;
    compared.clear();
    if (key) compared.add(key);
    lid.close();
    draw();
  }

  function column(key) {
    const nodes = store.path(chat, key);
    const box = el("article", { class: "column" }, el("header", { class: "row" },
      el("strong", {}, chat.nodes[key].idx === null ? "" : `#${chat.nodes[key].idx}`),
      el("button", { type: "button", class: "quiet", i18n: "open_chat", on: { click: () => { chat.current = key; store.changed(); go("chat"); } } })));
    for (const node of nodes.slice(0, -1)) box.append(el("p", { class: "before muted" }, node.question));
    const view = turnView(nodes[nodes.length - 1], chat.think);
    views.set(key, view);
    view.update(running.has(key));
    box.append(view.root);
    return box;
  }

  async function showCurl() {
    try {
      chat ??= store.create();
      const text = await command(chat, at, input.value.trim() || t("try_1"), sampling.values());
      await showCommand(text);
    } catch (error) {
      toast(error.message, "error");
    }
  }

  draw();
  return { leave: store.onChange(draw), relabel: draw };
}
