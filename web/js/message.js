// One turn on screen: question, folded thought, answer, figures.

import { el, number } from "./dom.js";
import { render } from "./markdown.js";
import { t } from "./i18n.js";

/** An element that shows a node; `update(live)` after the node has changed. While text comes it is plain, Markdown at the end. */
export function turnView(node, think) {
  const thought = el("div", { class: "thought-text plain" });
  const summary = el("summary", { i18n: "thought" });
  const folded = el("details", { class: "thought", hidden: true }, summary, thought);
  const answer = el("div", { class: "answer markdown" });
  const figures = el("div", { class: "figures muted" });
  const warning = el("p", { hidden: true });
  const root = el("div", { class: "turn" },
    el("div", { class: "question" }, el("div", { class: "plain", dir: "auto" }, node.question)),
    el("div", { class: "reply", dir: "auto" }, folded, answer, warning, figures));
  let shown = null;
  let wasLive = true;

  function update(live) {
    if (thought.textContent !== node.thought) thought.textContent = node.thought;
    folded.hidden = !node.thought;
    summary.dataset.i18n = live && !node.answer ? "thinking" : "thought";
    summary.textContent = t(summary.dataset.i18n);
    if (!live && wasLive && !node.answer) folded.open = true; // there is nothing else to see
    wasLive = live;
    root.setAttribute("aria-busy", String(live));
    const now = `${live} ${node.answer}`;
    if (shown !== now) {
      shown = now;
      answer.replaceChildren(node.answer ? render(node.answer) : waiting(live));
    }
    warning.textContent = node.error ?? note(live);
    warning.hidden = !warning.textContent;
    warning.className = node.error ? "error" : "muted remark";
    figures.textContent = node.stats ? told(node.stats).join(" · ") : "";
  }

  function note(live) {
    if (node.stopped) return t("stopped");
    if (live) return "";
    if (node.thought && !node.answer) return t("only_thought");
    return node.finish === "length" ? t("cut_at_limit") : "";
  }

  function told(stats) {
    const about = stats.estimated ? "≈ " : "";
    return [`${about}${number(stats.rate, 1)} ${t("tokens_per_second")}`, `${about}${number(stats.generated)} ${t("tokens")}`,
      stats.read !== null && `${number(stats.read)} ${t("read")}`, `${number(stats.cached)} ${t("from_state")}`,
      `${number(stats.first * 1000)} ms ${t("to_first")}`].filter(Boolean);
  }

  function waiting(live) {
    if (!live) return "";
    return el("span", { class: "dots", label: think ? "thinking" : "waiting" }, "•••");
  }

  update(false);
  return { root, update };
}
