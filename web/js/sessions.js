// What the server keeps: every session, where it is, and what can be done to it between turns.

import { blob, call, curl } from "./api.js";
import { confirmDialog, date, download, el, field, number, openDialog, showCommand, size, toast } from "./dom.js";
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
  const range = el("span", { class: "muted" });
  const pages = el("div", { class: "row end", hidden: true }, range, previous, next);
  root.append(el("div", { class: "panel row" }, counts, el("span", { class: "row end grow" },
    el("button", { type: "button", class: "quiet", i18n: "refresh", on: { click: () => show(offset) } }),
    el("button", { type: "button", class: "quiet", i18n: "curl", on: { click: showCurl } }),
    el("button", { type: "button", i18n: "import", on: { click: () => file.click() } }), file)),
  el("div", { class: "scroll", tabindex: 0, role: "region", label: "tab_sessions" }, el("table", { class: "sessions" },
    el("thead", {}, el("tr", {}, ["name", "tier", "size", "tokens_seen", "version", "updated", "actions"].map((key) => el("th", { scope: "col", i18n: key })))), body)),
  pages);

  async function show(from) {
    try {
      const page = await call("/state/status", { body: { offset: from, limit: PAGE } });
      if (!page.sessions.length && from > 0) return show(Math.max(0, from - PAGE));
      offset = from;
      counts.classList.remove("error");
      pages.hidden = from === 0 && page.next_offset === null;
      range.textContent = `${number(from + 1)}–${number(from + page.sessions.length)} / ${number(page.total_sessions)}`;
      counts.textContent = `${number(page.total_sessions)} ${t("sessions")} · VRAM ${number(page.l1_cache_count)} · RAM ${number(page.l2_cache_count)} · SQLite ${number(page.database_count)}`;
      body.replaceChildren(...(page.sessions.length ? page.sessions.map(row) : [el("tr", {}, el("td", { colspan: 7, class: "muted", i18n: "no_sessions" }))]));
      previous.disabled = from === 0;
      next.disabled = page.next_offset === null;
    } catch (error) {
      counts.textContent = error.message;
      counts.classList.add("error");
    }
  }

  function row(session) {
    const act = (key, action, kind = "quiet") => el("button", { type: "button", class: kind, i18n: key, on: { click: () => tried(() => action(session)) } });
    const name = el("th", { scope: "row", class: "name" }, el("span", { class: "plain clamp", dir: "auto", title: session.session_id }, session.session_id));
    return el("tr", {}, name, el("td", {}, el("span", { class: `badge tier-${TIERS[session.cache_level]}` }, TIERS[session.cache_level] ?? session.cache_level)),
      el("td", {}, size(session.bytes)), el("td", { "data-name": t("tokens_seen") }, number(session.tokens)), el("td", { "data-name": t("version") }, `${session.version}`),
      el("td", {}, date(session.updated)),
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

  /** A list of the versions of a session that the server still has, newest first. */
  async function versionsOf(session) {
    const { sessions: [found] } = await call("/state/status", { body: { session_id: session.session_id } });
    const versions = found?.versions ?? [session.version];
    return el("select", {}, versions.map((version, index) => el("option", { value: version }, `${version}${index ? "" : ` (${t("newest")})`}`)));
  }

  /** Ask for the fields of one action; resolves with whether it is to be done. */
  function askFor(key, session, text, ...fields) {
    return openDialog(key, (close) => [el("form", { on: { submit: (event) => { event.preventDefault(); close(true); } } },
      el("p", { class: "plain" }, session.session_id), text && el("p", { class: "muted", i18n: text }), fields,
      el("div", { class: "row end" }, el("button", { type: "button", i18n: "cancel", on: { click: () => close(false) } }), el("button", { type: "submit", class: "primary", i18n: key })))]);
  }

  async function fork(session) {
    const input = el("input", { type: "text", value: `${session.session_id.slice(0, 200)} copy`, maxlength: 256, required: true, autofocus: true });
    const version = await versionsOf(session);
    if (!(await askFor("fork", session, null, field("new_name", input), field("version", version)))) return;
    await call("/state/fork", { body: { session_id: session.session_id, copies: [input.value.trim()], version: Number(version.value) } });
    toast(t("done"));
  }

  async function rewind(session) {
    const version = await versionsOf(session);
    version.options[0].disabled = true; // it is there already
    if (version.options.length < 2) {
      toast(t("one_version"));
      return;
    }
    version.selectedIndex = 1;
    if (!(await askFor("rewind", session, "rewind_text", field("version", version)))) return;
    await call("/state/rewind", { body: { session_id: session.session_id, version: Number(version.value), expect_version: session.version } });
    toast(t("done"));
  }

  async function exportOne(session) {
    const name = session.session_id.replace(/[^\p{L}\p{N}_.-]+/gu, "_").slice(0, 100);
    download(`${name}.rwkvstate`, await blob("/state/export", { body: { session_id: session.session_id } }));
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
    const name = body.querySelector("th span")?.textContent ?? "tom";
    const commands = [["status", { offset, limit: PAGE }], ["status", { session_id: name }], ["fork", { session_id: name, copies: [`${name} copy`] }],
      ["rewind", { session_id: name }], ["delete", { session_id: name }]].map(([action, order]) => curl(`/state/${action}`, order));
    commands.push(`${curl("/state/export", { session_id: name })} -o session.rwkvstate`, `${curl("/state/import?session_id=NAME")} --data-binary @session.rwkvstate`);
    showCommand(commands.join("\n\n"));
  }

  show(0);
  return { leave() {}, relabel: () => show(offset) };
}
