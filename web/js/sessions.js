// What the server keeps: every session, where it is, and what can be done to it between turns.

import { blob, call, curl } from "./api.js";
import { confirmDialog, copy, download, el, number, openDialog, size, toast } from "./dom.js";
import { t } from "./i18n.js";
import * as store from "./store.js";

const PAGE = 50;
const TIERS = { "L1 (VRAM)": "VRAM", "L2 (RAM)": "RAM", "Database (Disk)": "SQLite" };

export function build(root, { go }) {
  let offset = 0;
  const body = el("tbody");
  const counts = el("p", { class: "muted" });
  const previous = el("button", { type: "button", i18n: "previous", on: { click: () => show(Math.max(0, offset - PAGE)) } });
  const next = el("button", { type: "button", i18n: "next", on: { click: () => show(offset + PAGE) } });
  const file = el("input", { type: "file", hidden: true, label: "import", on: { change: importFile } });
  root.append(el("div", { class: "panel row" }, counts, el("span", { class: "grow" }),
    el("button", { type: "button", class: "quiet", i18n: "refresh", on: { click: () => show(offset) } }),
    el("button", { type: "button", class: "quiet", i18n: "curl", on: { click: showCurl } }),
    el("button", { type: "button", i18n: "import", on: { click: () => file.click() } }), file),
  el("div", { class: "scroll", tabindex: 0, role: "region", label: "tab_sessions" }, el("table", { class: "sessions" },
    el("thead", {}, el("tr", {}, ["name", "tier", "size", "tokens", "version", "updated", "actions"].map((key) => el("th", { scope: "col", i18n: key })))), body)),
  el("div", { class: "row end" }, previous, next));

  async function show(from) {
    try {
      const page = await call("/state/status", { body: { offset: from, limit: PAGE } });
      offset = from;
      counts.textContent = `${number(page.total_sessions)} ${t("sessions")} · VRAM ${number(page.l1_cache_count)} · RAM ${number(page.l2_cache_count)} · SQLite ${number(page.database_count)}`;
      body.replaceChildren(...(page.sessions.length ? page.sessions.map(row) : [el("tr", {}, el("td", { colspan: 7, class: "muted", i18n: "no_sessions" }))]));
      previous.disabled = from === 0;
      next.disabled = page.next_offset === null;
    } catch (error) {
      counts.textContent = error.message;
    }
  }

  function row(session) {
    const act = (key, action, kind = "quiet") => el("button", { type: "button", class: kind, i18n: key, on: { click: () => tried(() => action(session)) } });
    const name = el("th", { scope: "row", class: "name plain", dir: "auto" }, session.session_id);
    return el("tr", {}, name, el("td", {}, el("span", { class: `badge tier-${TIERS[session.cache_level]}` }, TIERS[session.cache_level] ?? session.cache_level)),
      el("td", {}, size(session.bytes)), el("td", { "data-name": t("tokens") }, number(session.tokens)), el("td", { "data-name": t("version") }, `${session.version}`),
      el("td", {}, new Date(session.updated * 1000).toLocaleString(document.documentElement.lang)),
      el("td", {}, el("div", { class: "row tight" }, act("resume", resume), act("fork", fork), act("rewind", rewind), act("export", exportOne), act("delete", remove, "quiet danger-text"))));
  }

  async function tried(action) {
    try {
      await action();
    } catch (error) {
      toast(error.message, "error");
    }
    await show(offset);
  }

  /** A chat of this browser goes on where it is; any other session goes on in a copy, so that it stays as it is. */
  async function resume(session) {
    const [, owner, idx] = session.session_id.match(/^(.*):(\d+)$/s) ?? [];
    const known = store.all().find((chat) => chat.id === owner);
    const node = known && Object.values(known.nodes).find((other) => other.idx === Number(idx));
    if (node) {
      known.current = node.key;
      store.select(known.id);
    } else {
      const chat = store.create({ title: session.session_id.slice(0, 60), base: 1 });
      chat.baseTokens = session.tokens;
      await call("/state/fork", { body: { session_id: session.session_id, copies: [`${chat.id}:1`] } });
      store.changed();
    }
    go("chat");
  }

  async function fork(session) {
    const input = el("input", { type: "text", label: "name", value: `${session.session_id} copy`, maxlength: 256 });
    const name = await openDialog("fork", (close) => [el("form", { on: { submit: (event) => { event.preventDefault(); close(input.value.trim()); } } },
      el("label", { class: "field" }, el("span", { i18n: "name" }), input), el("div", { class: "row end" }, el("button", { type: "submit", class: "primary", i18n: "fork" })))]);
    if (!name) return;
    await call("/state/fork", { body: { session_id: session.session_id, copies: [name] } });
    toast(t("done"));
  }

  async function rewind(session) {
    if (!(await confirmDialog("rewind", session.session_id))) return;
    await call("/state/rewind", { body: { session_id: session.session_id } });
    toast(t("done"));
  }

  async function exportOne(session) {
    download(`${session.session_id.replace(/[^\w.-]+/g, "_")}.rwkvstate`, await blob("/state/export", { body: { session_id: session.session_id } }));
  }

  async function remove(session) {
    if (!(await confirmDialog("delete_session", session.session_id))) return;
    await call("/state/delete", { body: { session_id: session.session_id } });
    toast(t("done"));
  }

  async function importFile() {
    const [chosen] = file.files;
    file.value = "";
    if (!chosen) return;
    const name = chosen.name.replace(/\.rwkvstate$/, "");
    await tried(async () => {
      await call(`/state/import?session_id=${encodeURIComponent(name)}`, { body: chosen });
      toast(t("done"));
    });
  }

  function showCurl() {
    const text = curl("/state/status", { offset, limit: PAGE });
    openDialog("curl", () => [el("pre", { class: "command", tabindex: 0 }, text), el("button", { type: "button", i18n: "copy", on: { click: () => copy(text) } })]);
  }

  show(0);
  return { leave() {}, relabel: () => show(offset) };
}
