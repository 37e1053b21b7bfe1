// What an operator looks at: speed, rows, latency, the state pool, limits.

import uPlot from "../vendor/uplot-1.6.32.js";
import { about } from "./about.js";
import { call, curl, text } from "./api.js";
import { copy, el, number, openDialog, size } from "./dom.js";
import { parse, quantile } from "./figures.js";
import { t } from "./i18n.js";

const EVERY = 1000; // ms
const KEPT = 300; // readings
const WINDOW = 30; // readings that a percentile is taken over
const PREFIX = "rwkv_batch:";

const CHARTS = [
  { title: "chart_speed", series: [["generated", "tokens"], ["read_tokens", "prompt"]] },
  { title: "chart_rows", series: [["running", "running"], ["waiting_rows", "waiting"]] },
  { title: "chart_first", unit: "ms", series: [["p50", "first50"], ["p95", "first95"]] },
  { title: "chart_itl", unit: "ms", series: [["p50", "itl50"], ["p95", "itl95"]] },
  { title: "chart_tiers", series: [["VRAM", "l1"], ["RAM", "l2"], ["unsaved", "dirty"]] },
  { title: "chart_prefix", unit: "MiB", series: [["prefixes", "prefix"]] },
];

const clock = (seconds) => new Date(seconds * 1000).toTimeString().slice(0, 8);

let readings = []; // kept while other tabs are open

export function build(root) {
  const charts = el("div", { class: "charts" });
  const card = el("dl", { class: "card facts" });
  const limits = el("dl", { class: "card facts" });
  const problem = el("p", { class: "error", hidden: true });
  const plots = [];
  let timer = null;
  root.append(el("div", { class: "row" }, el("span", { class: "grow" }), el("button", { type: "button", class: "quiet", i18n: "curl", on: { click: showCurl } })), problem, charts,
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
        axes: [{ ...axis, size: 24, space: 70, values: (_, times) => times.map(clock) }, axis],
        series: [{ label: t("time"), value: (_, at) => (at === null ? "–" : clock(at)) }, ...chart.series.map(([name], index) => ({ label: t(name), stroke: colours[index], width: 2, spanGaps: true, points: { show: false }, value: (_, value) => (value === null ? "–" : number(value, 1)) }))],
      }, data(chart), frame);
      plots.push(plot);
    }
  }

  function data(chart) {
    return [readings.map((reading) => reading.at), ...chart.series.map(([, key]) => readings.map((reading) => reading[key] ?? null))];
  }

  async function read() {
    try {
      const [stats, metrics] = await Promise.all([call("/stats"), text("/metrics")]);
      take(stats.engine, parse(metrics));
      problem.hidden = true;
    } catch (error) {
      problem.hidden = false;
      problem.textContent = error.status === 403 ? t("needs_owner") : error.message;
    }
    plots.forEach((plot, index) => plot.setData(data(CHARTS[index])));
    timer = setTimeout(read, EVERY);
  }

  function take(engine, { histograms }) {
    const now = Date.now() / 1000;
    const last = readings[readings.length - 1];
    const since = readings[Math.max(0, readings.length - WINDOW)];
    const rate = (key) => (last ? Math.max(0, (engine[key] - last.raw[key]) / Math.max(0.05, now - last.at)) : null);
    const ms = (name, share) => {
      const value = quantile(since?.histograms.get(PREFIX + name), histograms.get(PREFIX + name), share);
      return value === null ? null : value * 1000;
    };
    readings.push({
      at: now, raw: engine, histograms,
      tokens: rate("generation_tokens_total"), prompt: rate("prompt_tokens_total"),
      running: engine.sequences_running, waiting: engine.sequences_waiting,
      first50: ms("time_to_first_token_seconds", 0.5), first95: ms("time_to_first_token_seconds", 0.95),
      itl50: ms("inter_token_latency_seconds", 0.5), itl95: ms("inter_token_latency_seconds", 0.95),
      l1: engine.state_l1_sessions, l2: engine.state_l2_sessions, dirty: engine.state_dirty_sessions, prefix: (engine.prefix_bytes ?? 0) / 2 ** 20,
    });
    if (readings.length > KEPT) readings = readings.slice(-KEPT);
    facts(card, { model: engine.model, phase: engine.phase, device: engine.device, dtype: engine.dtype, ops: engine.ops, vocab_size: number(engine.vocab_size ?? 0),
      fingerprint: engine.fingerprint, slots: `${engine.slots - engine.slots_free} / ${engine.slots}`, steps: number(engine.steps_total), generated_total: number(engine.generation_tokens_total),
      prefix_cache: `${number(engine.prefix_states ?? 0)} · ${size(engine.prefix_bytes ?? 0)}` });
  }

  function facts(list, values) {
    list.replaceChildren(...Object.entries(values).flatMap(([name, value]) => [el("dt", { i18n: `fact_${name}` }), el("dd", { class: "plain" }, String(value ?? "–"))]));
  }

  function showCurl() {
    const commands = `${curl("/stats")}\n${curl("/metrics")}`;
    openDialog("curl", () => [el("pre", { class: "command", tabindex: 0 }, commands), el("button", { type: "button", i18n: "copy", on: { click: () => copy(commands) } })]);
  }

  about().then(({ limits: found, version }) => facts(limits, { version, ...found })).catch(() => {});
  layOut();
  read();
  const resized = () => layOut();
  addEventListener("resize", resized);
  return { leave: () => { clearTimeout(timer); removeEventListener("resize", resized); for (const plot of plots) plot.destroy(); }, relabel: layOut };
}
