// One request, up to hundreds of rows, each in its own cell as it is written.

import { about } from "./about.js";
import { curl, events } from "./api.js";
import { copy, download, el, field, number, openDialog, showCommand, toast } from "./dom.js";
import { t } from "./i18n.js";
import { Rows } from "./rows.js";
import { samplingControls } from "./sampling.js";

const MOST = 320;
const TAIL = 420; // characters of a cell that can be seen
const DRAWN = 96; // cells brought up to date in one drawing; the others have their turn in the next
const EVERY = 80; // ms between two drawings: one step of the engine comes in several reads

let rows = null; // of the last run: it goes on and stays when another tab is open
let controller = null;
let cells = [];
let redraw = () => {};
let problem = "";
let typed = null; // the prompt, while another tab is open

export function build(root) {
  const sampling = samplingControls({ max_tokens: 200, temperature: 1 });
  const prompt = el("textarea", { rows: 2, label: "prompt", required: true, hint: "board_hint" });
  const count = el("input", { type: "number", min: 1, max: MOST, value: 64 });
  const mode = el("select", {}, el("option", { value: "same", i18n: "same_prompt" }), el("option", { value: "lines", i18n: "a_line_each" }));
  const template = el("input", { type: "checkbox", checked: true });
  const startButton = el("button", { type: "submit", class: "primary", i18n: "run" });
  const stopButton = el("button", { type: "button", class: "danger", i18n: "stop", on: { click: () => controller?.abort() } });
  const total = el("strong", { class: "big" });
  const state = el("span", { class: "muted" });
  const warning = el("p", { class: "error", role: "alert", hidden: true });
  const empty = el("p", { class: "welcome muted", i18n: "board_empty" });
  const numLines = el("span", { class: "muted", hidden: true });
  const exportButton = el("button", { type: "button", class: "quiet", i18n: "export", on: { click: () => download("board.jsonl", rows.jsonl()) } });
  const bar = el("progress", { max: 1, value: 0, label: "finished_rows" });
  const totals = el("div", { class: "totals row" }, total, state, bar);
  const grid = el("div", { class: "board", role: "list", label: "rows" });
  const seen = new Set();
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const index = Number(entry.target.dataset.index);
      if (entry.isIntersecting) {
        seen.add(index);
        rows?.changed.add(index);
      } else seen.delete(index);
    }
    schedule();
  }, { rootMargin: "200px" });
  const copies = field("copies", count);
  mode.addEventListener("change", countRows);
  prompt.addEventListener("input", countRows);
  prompt.value = typed ?? t("board_prompt");

  root.append(el("form", { class: "panel", on: { submit: (event) => { event.preventDefault(); start(); } } },
    field("prompt", prompt, { class: "field grow" }),
    el("div", { class: "row" }, field("mode", mode), copies, numLines, el("label", { class: "check" }, template, el("span", { i18n: "chat_template" })), sampling.node,
      el("span", { class: "row end grow" },
        el("button", { type: "button", class: "quiet", i18n: "curl", on: { click: showCurl } }), exportButton, stopButton, startButton))),
    warning, totals, empty, grid);

  const lines = () => prompt.value.split("\n").filter((line) => line.trim()).slice(0, MOST);

  function countRows() {
    const isList = mode.value === "lines";
    copies.hidden = isList;
    numLines.hidden = !isList;
    numLines.textContent = `${lines().length} ${t("rows")}`;
  }

  function body() {
    const asked = Math.min(MOST, Math.max(1, Math.floor(Number(count.value)) || 1));
    const contents = mode.value === "lines" ? lines() : Array(asked).fill(prompt.value);
    return { contents, ...sampling.values(), stream: true, chunk_size: contents.length > 64 ? 4 : 1 };
  }

  const path = () => (template.checked ? "/v3/chat/completions" : "/v1/chat/completions");

  async function start() {
    if (controller) return;
    const sent = body();
    if (!sent.contents.length || !sent.contents[0].trim()) return;
    controller = new AbortController();
    rows = new Rows(sent.contents, sent.chunk_size);
    problem = "";
    layOut();
    try {
      for await (const batch of events(path(), sent, controller.signal)) {
        for (const event of batch) rows.take(event);
        schedule();
      }
    } catch (error) {
      if (!controller.signal.aborted) problem = error.message;
    }
    rows.end();
    controller = null;
    if (rows.exact !== null) toast(t("done"));
    for (let index = 0; index < cells.length; index++) rows.changed.add(index);
    redraw();
  }

  function layOut() {
    watcher.disconnect();
    seen.clear();
    cells = (rows?.prompts ?? []).map((_, index) => {
      const text = document.createTextNode("");
      const figure = document.createTextNode("");
      const button = el("button", { type: "button", class: "cell", "data-index": index, role: "listitem", on: { click: () => zoom(index) } },
        el("span", { class: "cell-head" }, el("span", {}, `${index}`), el("span", { class: "muted" }, figure)),
        el("span", { class: "cell-text", dir: "auto" }, el("span", {}, text)));
      watcher.observe(button);
      return { button, text, figure, state: "" };
    });
    grid.replaceChildren(...cells.map(({ button }) => button));
    if (rows) for (let index = 0; index < cells.length; index++) rows.changed.add(index);
    schedule();
  }

  let due = false;
  let lastDrawn = 0;
  function schedule() {
    if (due) return;
    due = true;
    setTimeout(() => requestAnimationFrame(draw), Math.max(0, lastDrawn + EVERY - performance.now()));
  }
  redraw = schedule;

  function draw() {
    due = false;
    lastDrawn = performance.now();
    startButton.disabled = Boolean(controller);
    stopButton.hidden = !controller;
    exportButton.disabled = !rows;
    totals.hidden = !rows;
    empty.hidden = Boolean(rows);
    warning.hidden = !problem;
    warning.textContent = problem;
    if (!rows) return;
    let drawn = 0;
    for (const index of rows.changed) {
      if (seen.has(index) && drawn++ === DRAWN) break;
      rows.changed.delete(index);
      drawCell(index, seen.has(index));
    }
    const rate = rows.tokens / Math.max(rows.seconds, 1e-3);
    total.textContent = `${number(rate)} ${t("tokens_per_second")}`;
    const perRow = rate / Math.max(1, rows.ended ? rows.prompts.length : rows.prompts.length - rows.numFinished);
    state.textContent = `${rows.exact === null ? "≈ " : ""}${number(rows.tokens)} ${t("tokens")} · ${rows.prompts.length - rows.numFinished} ${t("left")} · ${rows.numFinished} ${t("finished")} · ${number(perRow, 1)} ${t("per_row")} · ${number(rows.seconds, 1)} s`;
    bar.value = rows.numFinished / rows.prompts.length;
    if (rows.changed.size) schedule();
  }

  /** Bring a cell up to date; the text of one that is out of sight waits until it is seen. */
  function drawCell(index, isSeen) {
    const cell = cells[index];
    if (!cell) return;
    if (isSeen) {
      cell.text.data = rows.texts[index].trimStart().slice(-TAIL);
      cell.figure.data = figures(index);
    }
    const state = rows.finish[index] ? (rows.finish[index] === "error" ? "failed" : "done") : rows.pieces[index] ? "live" : "";
    if (state !== cell.state) cell.button.className = `cell ${(cell.state = state)}`;
  }

  function figures(index) {
    const rate = rows.rate(index);
    return [rate !== null && `${number(rate, rate < 10 ? 1 : 0)}/s`, rows.finish[index]].filter(Boolean).join(" · ");
  }

  function zoom(index) {
    const text = el("div", { class: "plain zoomed", dir: "auto", tabindex: 0 }, rows.texts[index]);
    const told = el("span", { class: "muted grow totals" });
    const update = () => {
      if (text.textContent.length !== rows.texts[index]?.length) text.textContent = rows.texts[index] ?? "";
      told.textContent = `#${index} · ${figures(index)}`;
    };
    update();
    const timer = setInterval(update, 100);
    openDialog("row_text", () => [el("p", { class: "muted plain prompt" }, rows.prompts[index]), text,
      el("div", { class: "row end" }, told, el("button", { type: "button", i18n: "copy", on: { click: () => copy(rows.texts[index]) } }))]).then(() => clearInterval(timer));
  }

  function showCurl() {
    showCommand(curl(path(), body(), true));
  }

  about().then(({ limits }) => { count.max = Math.min(MOST, limits.max_prompts); }).catch(() => {});
  layOut();
  const timer = setInterval(() => controller && schedule(), 250);
  countRows();
  return { leave: () => { typed = prompt.value; clearInterval(timer); watcher.disconnect(); redraw = () => {}; }, relabel: () => { countRows(); schedule(); } };
}
