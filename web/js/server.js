// What an operator looks at: speed, rows, latency, the state pool, limits.

import uPlot from "../vendor/uplot-1.6.32.js";
import { about } from "./about.js";
import { call, curl, text } from "./api.js";
import { el, number, showCommand, size } from "./dom.js";
import { parse, quantile } from "./figures.js";
import { t } from "./i18n.js";

const EVERY = 1000; // ms
const KEPT = 300; // readings
const WINDOW = 30; // readings that a percentile is taken over
const PREFIX = "rwkv_batch:";

const CHARTS = [
  { title: "chart_speed", series: [["generated", "tokens"], ["read_tokens", "prompt"]] },
  { title: "chart_rows", whole: true, series: [["running", "running"], ["waiting_rows", "waiting"]] },
  { title: "chart_first", unit: "ms", series: [["p50", "first50"], ["p95", "first95"]] },
  { title: "chart_itl", unit: "ms", series: [["p50", "itl50"], ["p95", "itl95"]] },
  { title: "chart_tiers", whole: true, series: [["VRAM", "l1"], ["RAM", "l2"], ["unsaved", "dirty"]] },
  { title: "chart_process", unit: "MiB", series: [["VRAM", "device"], ["RAM", "host"]] },
  { title: "chart_memory", unit: "MiB", series: [["VRAM", "l1Bytes"], ["RAM", "l2Bytes"], ["prefixes", "prefix"]] },
];

const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 100000];
const COUNTS = ["sequences_running", "sequences_waiting", "slots", "slots_free", "generation_tokens_total", "prompt_tokens_total"];

const inMib = (bytes) => (bytes === undefined ? null : bytes / 2 ** 20);
const clock = (seconds) => new Date(seconds * 1000).toTimeString().slice(0, 8);

let readings = []; // kept while other tabs are open
let stateBytes = null; // of one session

export function build(root) {
  const charts = el("div", { class: "charts" });
  const card = el("dl", { class: "card facts" });
  const limits = el("dl", { class: "card facts" });
  const problem = el("p", { class: "error", role: "alert", hidden: true });
  const now = el("dl", { class: "now" });
  const plots = [];
  let timer = null;
  let left = false;
  root.append(el("div", { class: "panel row" }, now, el("span", { class: "row end grow" }, el("button", { type: "button", class: "quiet", i18n: "curl", on: { click: showCurl } }))), problem, charts,
    el("div", { class: "cards" }, el("section", {}, el("h2", { i18n: "model" }), card), el("section", {}, el("h2", { i18n: "limits" }), limits)));

  function layOut() {
    for (const plot of plots.splice(0)) plot.destroy();
    charts.replaceChildren();
    const style = getComputedStyle(document.documentElement);
    const colours = ["--accent", "--second", "--third"].map((name) => style.getPropertyValue(name).trim());
    const axis = { stroke: style.getPropertyValue("--muted").trim(), grid: { stroke: style.getPropertyValue("--line").trim(), width: 1 }, ticks: { show: false }, size: 56, font: "12px system-ui" };
    for (const chart of CHARTS) {
      const frame = el("figure", { class: "card chart" }, el("figcaption", {}, el("span", { i18n: chart.title }), chart.unit ? ` (${chart.unit})` : ""));
      charts.append(frame);
      const width = Math.max(220, frame.clientWidth - 24);
      const plot = new uPlot({
        width, height: 170, cursor: { y: false }, legend: { live: true },
        scales: { y: { range: (_, low, high) => [0, Math.max(1, high * 1.1)] } },
        axes: [{ ...axis, size: 24, space: 70, values: (_, times) => times.map((at) => (readings.length ? clock(at) : "")) }, chart.whole ? { ...axis, incrs: WHOLE } : axis],
        series: [{ label: t("time"), value: (_, at) => (at === null ? "–" : clock(at)) }, ...chart.series.map(([name], index) => ({ label: t(name), stroke: colours[index], width: 2, spanGaps: true, points: { show: false }, value: (_, value) => (value === null ? "–" : number(value, 1)) }))],
      }, data(chart), frame);
      plots.push(plot);
      sayLast(plot);
    }
  }

  /** The legend tells the newest figures while nobody points at others. */
  function sayLast(plot) {
    if (readings.length && plot.cursor.idx === null) plot.setLegend({ idx: readings.length - 1 });
  }

  function data(chart) {
    return [readings.map((reading) => reading.at), ...chart.series.map(([, key]) => readings.map((reading) => reading[key] ?? null))];
  }

  async function read() {
    try {
      const [stats, metrics] = await Promise.all([call("/stats"), text("/metrics")]);
      take(stats.engine, parse(metrics));
      tell(stats.engine.phase === "ready" ? "" : `${t("engine_not_ready")}: ${stats.engine.phase}`);
      if (stateBytes === null && stats.engine.state_l1_sessions + stats.engine.state_l2_sessions > 0) await weigh();
    } catch (error) {
      tell(error.status === 403 ? t("needs_owner") : error.message);
    }
    if (left) return;
    plots.forEach((plot, index) => plot.setData(data(CHARTS[index])));
    plots.forEach(sayLast);
    timer = setTimeout(read, EVERY);
  }

  function tell(text) {
    problem.hidden = !text;
    problem.textContent = text;
  }

  /** How large the state of a session is: all have the same size. */
  async function weigh() {
    const { sessions: [session] } = await call("/state/status", { body: { offset: 0, limit: 1 } });
    stateBytes = session?.bytes ?? null;
  }

  function take(engine, { histograms }) {
    const at = Date.now() / 1000;
    if (COUNTS.some((key) => engine[key] === undefined)) { // while the engine starts it has nothing to say
      readings.push({ at, raw: null, histograms });
      facts(card, "fact_", { model: engine.model, phase: engine.phase });
      return;
    }
    const last = readings[readings.length - 1];
    const since = readings[Math.max(0, readings.length - WINDOW)];
    const rate = (key) => (last?.raw ? Math.max(0, (engine[key] - last.raw[key]) / Math.max(0.05, at - last.at)) : null);
    const mib = (count) => (stateBytes === null && count > 0 ? null : (count * stateBytes) / 2 ** 20);
    const ms = (name, share) => {
      const value = quantile(since?.histograms.get(PREFIX + name), histograms.get(PREFIX + name), share);
      return value === null ? null : value * 1000;
    };
    const reading = {
      at, raw: engine, histograms,
      tokens: rate("generation_tokens_total"), prompt: rate("prompt_tokens_total"),
      running: engine.sequences_running, waiting: engine.sequences_waiting,
      first50: ms("time_to_first_token_seconds", 0.5), first95: ms("time_to_first_token_seconds", 0.95),
      itl50: ms("inter_token_latency_seconds", 0.5), itl95: ms("inter_token_latency_seconds", 0.95),
      l1: engine.state_l1_sessions, l2: engine.state_l2_sessions, dirty: engine.state_dirty_sessions,
      l1Bytes: mib(engine.state_l1_sessions), l2Bytes: mib(engine.state_l2_sessions), prefix: (engine.prefix_bytes ?? 0) / 2 ** 20,
      host: inMib(engine.host_memory_bytes), device: inMib(engine.device_memory_bytes),
    };
    readings.push(reading);
    if (readings.length > KEPT) readings = readings.slice(-KEPT);
    facts(now, "now_", { speed: number(reading.tokens), rows: `${number(reading.running)} / ${number(engine.slots)}`, waiting: number(reading.waiting),
      first: `${number(reading.first95)} ms`, itl: `${number(reading.itl95)} ms`, sessions: number(reading.l1 + reading.l2) });
    facts(card, "fact_", { model: engine.model, phase: engine.phase, device: engine.device, dtype: engine.dtype, ops: engine.ops, vocab_size: number(engine.vocab_size ?? 0),
      fingerprint: engine.fingerprint, slots: `${engine.slots - engine.slots_free} / ${engine.slots}`, steps: number(engine.steps_total), generated_total: number(engine.generation_tokens_total),
      prefix_cache: `${number(engine.prefix_states ?? 0)} · ${size(engine.prefix_bytes ?? 0)}` });
  }

  function facts(list, prefix, values) {
    list.replaceChildren(...Object.entries(values).map(([name, value]) => el("div", {}, el("dt", { i18n: `${prefix}${name}` }), el("dd", { class: "plain" }, typeof value === "number" ? number(value) : String(value ?? "–")))));
  }

  function showCurl() {
    showCommand(["/stats", "/metrics", "/healthz", "/"].map((path) => curl(path)).join("\n"));
  }

  about().then(({ limits: found, version }) => facts(limits, "fact_", { version, ...found })).catch(() => {});
  layOut();
  read();
  const resized = () => layOut();
  addEventListener("resize", resized);
  return { leave: () => { left = true; clearTimeout(timer); removeEventListener("resize", resized); for (const plot of plots) plot.destroy(); }, relabel: layOut };
}
