// Two panes: paragraphs on the left, their translations beside them.

import { call, curl } from "./api.js";
import { copy, el, field, number, showCommand } from "./dom.js";
import { language, t } from "./i18n.js";

const CODES = ["en", "zh-CN", "zh-TW", "ja", "ko", "fr", "de", "es", "pt", "it", "nl", "ru", "uk", "pl", "cs", "sv", "da", "no", "fi",
  "el", "tr", "ar", "he", "fa", "hi", "bn", "ta", "th", "vi", "id", "ms", "ro", "hu", "bg", "sr", "hr", "sk", "sl", "lt", "lv", "et", "ca"];
const PATH = "/translate/v1/batch-translate";

let kept = { text: null, results: [], sent: [], target: "" }; // while another tab is open

export function build(root) {
  const source = el("select", {});
  const target = el("select", {});
  const input = el("textarea", { rows: 6, label: "source_text", hint: "translate_hint", dir: "auto", on: { keydown: (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) start(); } } });
  const output = el("div", { class: "pairs", role: "region", tabindex: 0, label: "translation" });
  const button = el("button", { type: "submit", class: "primary", i18n: "translate" });
  const copyButton = el("button", { type: "button", class: "quiet", i18n: "copy", on: { click: () => copy(kept.results.map((result) => result.text).join("\n")) } });
  input.value = kept.text ?? t("translate_example");

  root.append(el("form", { class: "translate", on: { submit: (event) => { event.preventDefault(); start(); } } },
    el("div", { class: "row languages" }, field("from", source), el("button", { type: "button", class: "quiet", label: "swap", on: { click: swap } }, "⇄"), field("to", target),
      el("span", { class: "row end grow" }, el("button", { type: "button", class: "quiet", i18n: "curl", on: { click: showCurl } }), copyButton, button)),
    el("div", { class: "panes" }, input, output)));

  function fill(select, chosen, extra = []) {
    const names = new Intl.DisplayNames([language()], { type: "language" });
    select.replaceChildren(...extra, ...CODES.map((code) => el("option", { value: code, selected: code === chosen }, `${names.of(code)} (${code})`)));
  }

  function relabel() {
    fill(source, source.value, [el("option", { value: "auto", i18n: "detect", selected: source.value === "auto" || !source.value })]);
    fill(target, target.value || kept.target || (language() === "zh" ? "en" : "zh-CN"));
    show();
  }

  function swap() {
    if (source.value === "auto") return;
    [source.value, target.value] = [target.value, source.value];
  }

  function body() {
    return { source_lang: source.value, target_lang: target.value, text_list: input.value.split("\n").filter((line) => line.trim()) };
  }

  async function start() {
    const sent = body();
    if (!sent.text_list.length || button.disabled) return;
    button.disabled = true;
    output.replaceChildren(el("p", { class: "muted", i18n: "working" }));
    const began = performance.now();
    try {
      const results = (await call(PATH, { body: sent })).translations;
      kept = { text: input.value, results, sent: sent.text_list, target: sent.target_lang, seconds: (performance.now() - began) / 1000 };
      show();
    } catch (error) {
      output.replaceChildren(el("p", { class: "error", role: "alert" }, error.message));
    }
    button.disabled = false;
  }

  function show() {
    const { results, sent, target: into, seconds } = kept;
    copyButton.disabled = !results.length;
    if (!results.length) return output.replaceChildren(el("p", { class: "muted", i18n: "translate_empty" }));
    const failed = results.filter((result) => result.error).length;
    output.replaceChildren(...results.map((result, index) => pair(result, sent[index], into)),
      el("p", { class: "muted figures" }, `${results.length - failed} ${t("paragraphs")} · ${failed ? `${failed} ${t("with_errors")} · ` : ""}${number(seconds, 1)} s`));
  }

  /** A paragraph and its translation; one that failed comes back as it was sent, so only the reason is shown. */
  function pair(result, text, into) {
    return el("div", { class: `pair${result.error ? " failed" : ""}` },
      el("p", { class: "plain muted", dir: "auto" }, text),
      result.error ? el("p", { class: "error plain" }, result.error) : el("p", { class: "plain", dir: "auto", lang: into }, result.text),
      source.value === "auto" && el("span", { class: "badge muted" }, result.detected_source_lang));
  }

  function showCurl() {
    showCommand(curl(PATH, body()));
  }

  relabel();
  return { leave: () => { kept.text = input.value; }, relabel };
}
