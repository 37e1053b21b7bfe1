// A dialogue as the tree it is: branch anywhere, several at once, and compare the branches side by side.

import { copy, el, field, openDialog, toast } from "./dom.js";
import { t } from "./i18n.js";
import { turnView } from "./message.js";
import { samplingControls } from "./sampling.js";
import * as store from "./store.js";
import { command, run } from "./turn.js";

const MOST = 16; // branches at once

export function build(root, { go }) {
  const sampling = samplingControls();
  const running = new Set();
  const compared = new Set();
  let at = null; // key of the node that is continued; null: the beginning
  let chat = null;
  const views = new Map();

  const picker = el("select", { label: "chat", on: { change: () => store.select(picker.value) } });
  const tree = el("div", { class: "tree" });
  const columns = el("div", { class: "columns", tabindex: 0, role: "region", label: "compared" });
  const input = el("textarea", { rows: 2, hint: "branch_hint", label: "message" });
  const count = el("input", { type: "number", min: 1, max: MOST, value: 3, class: "narrow" });
  const where = el("p", { class: "muted" });
  const form = el("form", { class: "composer", on: { submit: (event) => { event.preventDefault(); branch(); } } },
    where, input, el("div", { class: "row end" }, field("branches", count),
      el("button", { type: "button", class: "quiet", i18n: "curl", on: { click: showCurl } }),
      el("button", { type: "submit", class: "primary", i18n: "branch" })));
  root.append(el("div", { class: "split dialogue" },
    el("aside", { class: "side" },
      el("div", { class: "row" }, picker, el("button", { type: "button", i18n: "new_chat", on: { click: () => store.create() } })), tree, sampling.node),
    el("section", { class: "talk" }, columns, form)));

  async function branch() {
    const question = input.value.trim();
    const copies = Math.min(MOST, Math.max(1, Math.floor(Number(count.value)) || 1));
    if (!question) return;
    chat ??= store.create();
    input.value = "";
    compared.clear();
    const values = sampling.values();
    const nodes = Array.from({ length: copies }, () => store.addNode(chat, at, question));
    for (const node of nodes) {
      running.add(node.key);
      compared.add(node.key);
    }
    chat.current = nodes[0].key;
    store.changed();
    await Promise.all(nodes.map((node, index) => runOne(node, values.seed === undefined ? values : { ...values, seed: values.seed + index })));
  }

  async function runOne(node, values) {
    let due = false;
    await run(chat, node, values, new AbortController().signal, () => {
      if (due) return;
      due = true;
      setTimeout(() => {
        due = false;
        views.get(node.key)?.update(running.has(node.key));
      }, 60);
    });
    running.delete(node.key);
    draw();
  }

  function draw() {
    const now = store.current();
    if (now !== chat) {
      chat = now;
      at = chat?.current ?? null;
      compared.clear();
      if (at) compared.add(at);
    }
    if (at && !chat?.nodes[at]) at = null;
    picker.replaceChildren(...store.all().map((other) => el("option", { value: other.id, selected: other === chat }, other.title || t("untitled"))));
    tree.replaceChildren(el("ul", { role: "tree", label: "tab_tree" }, item(null)));
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
      node && el("input", { type: "checkbox", label: "compare", checked: compared.has(key), on: { change: (event) => { event.target.checked ? compared.add(key) : compared.delete(key); draw(); } } }),
      el("button", { type: "button", class: "quiet name", on: { click: () => { at = key; compared.clear(); if (key) compared.add(key); draw(); } } },
        el("span", { class: "node-question" }, name),
        node && el("span", { class: "node-answer muted" }, running.has(key) ? "…" : node.answer.slice(0, 90))),
      node && el("span", { class: "muted badge" }, node.idx === null ? "–" : `#${node.idx}`));
    return el("li", { role: "treeitem", "aria-selected": key === at, "aria-expanded": below.length ? "true" : null }, row,
      below.length ? el("ul", { role: "group" }, below.map((child) => item(child.key))) : null);
  }

  function column(key) {
    const nodes = store.path(chat, key);
    const box = el("article", { class: "column" }, el("header", { class: "row" },
      el("strong", {}, `#${chat.nodes[key].idx ?? "–"}`),
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
      await openDialog("curl", () => [el("pre", { class: "command", tabindex: 0 }, text), el("button", { type: "button", i18n: "copy", on: { click: () => copy(text) } })]);
    } catch (error) {
      toast(error.message, "error");
    }
  }

  draw();
  return { leave: store.onChange(draw), relabel: draw };
}
