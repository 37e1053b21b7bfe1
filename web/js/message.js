// One turn on screen: question, folded thought, answer, figures.

import { el, number } from "./dom.js";
import { render } from "./markdown.js";
import { t } from "./i18n.js";

/** An element that shows a node; `update(live)` after the node has changed. While text comes it is plain, Markdown at the end. */
export function turnView(node, think) {
  const thought = el("div", { class: "thought-text plain" });
  const folded = el("details", { class: "thought", hidden: true }, el("summary", { i18n: "thought" }), thought);
  const answer = el("div", { class: "answer markdown" });
  const figures = el("div", { class: "figures muted" });
  const warning = el("p", { class: "error", hidden: true });
  const root = el("div", { class: "turn" },
    el("div", { class: "question" }, el("div", { class: "plain", dir: "auto" }, node.question)),
    el("div", { class: "reply", dir: "auto" }, folded, answer, warning, figures));
  let shown = null;

  function update(live) {
    if (thought.textContent !== node.thought) thought.textContent = node.thought;
    folded.hidden = !node.thought;
    const now = `${live} ${node.answer}`;
    if (shown !== now) {
      shown = now;
      answer.replaceChildren(node.answer ? render(node.answer) : waiting(live));
    }
    warning.hidden = !node.error && !node.stopped;
    warning.textContent = node.error ?? (node.stopped ? t("stopped") : "");
    warning.classList.toggle("muted", !node.error);
    const { stats } = node;
    figures.textContent = stats ? `${number(stats.rate, 1)} ${t("tokens_per_second")} · ${number(stats.generated)} ${t("tokens")} · ${number(stats.read)} ${t("read")} · ${number(stats.cached)} ${t("from_state")} · ${number(stats.first * 1000)} ms ${t("to_first")}` : "";
  }

  function waiting(live) {
    if (!live) return "";
    return el("span", { class: "dots", label: think ? "thinking" : "waiting" }, "•••");
  }

  update(false);
  return { root, update };
}
