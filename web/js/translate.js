// Two panes: paragraphs on the left, their translations beside them.

import { call, curl } from "./api.js";
import { copy, el, field, openDialog, toast } from "./dom.js";
import { language, t } from "./i18n.js";

const CODES = ["en", "zh-CN", "zh-TW", "ja", "ko", "fr", "de", "es", "pt", "it", "nl", "ru", "uk", "pl", "cs", "sv", "da", "no", "fi",
  "el", "tr", "ar", "he", "fa", "hi", "bn", "ta", "th", "vi", "id", "ms", "ro", "hu", "bg", "sr", "hr", "sk", "sl", "lt", "lv", "et", "ca"];
const PATH = "/translate/v1/batch-translate";

export function build(root) {
  const source = el("select", {});
  const target = el("select", {});
  const input = el("textarea", { rows: 14, label: "source_text", hint: "translate_hint", dir: "auto", on: { keydown: (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) start(); } } });
  const output = el("div", { class: "pairs", role: "region", tabindex: 0, label: "translation" });
  const button = el("button", { type: "submit", class: "primary", i18n: "translate" });
  let results = [];
  input.value = t("translate_example");

  root.append(el("form", { class: "translate", on: { submit: (event) => { event.preventDefault(); start(); } } },
    el("div", { class: "row" }, field("from", source), el("button", { type: "button", class: "quiet", label: "swap", on: { click: swap } }, "⇄"), field("to", target),
      el("span", { class: "grow" }),
      el("button", { type: "button", class: "quiet", i18n: "curl", on: { click: showCurl } }),
      el("button", { type: "button", class: "quiet", i18n: "copy", on: { click: () => copy(results.map((result) => result.text).join("\n")) } }), button),
    el("div", { class: "panes" }, input, output)));

  function fill(select, chosen, extra = []) {
    const names = new Intl.DisplayNames([language()], { type: "language" });
    select.replaceChildren(...extra, ...CODES.map((code) => el("option", { value: code, selected: code === chosen }, `${names.of(code)} (${code})`)));
  }

  function relabel() {
    fill(source, source.value, [el("option", { value: "auto", i18n: "detect", selected: source.value === "auto" || !source.value })]);
    fill(target, target.value || (language() === "zh" ? "en" : "zh-CN"));
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
    try {
      results = (await call(PATH, { body: sent })).translations;
      output.replaceChildren(...results.map((result, index) => el("div", { class: `pair${result.error ? " failed" : ""}` },
        el("p", { class: "plain muted", dir: "auto" }, sent.text_list[index]),
        el("p", { class: "plain", dir: "auto", lang: target.value }, result.text),
        result.error && el("p", { class: "error" }, result.error),
        source.value === "auto" && el("span", { class: "badge muted" }, result.detected_source_lang))));
    } catch (error) {
      output.replaceChildren(el("p", { class: "error" }, error.message));
    }
    button.disabled = false;
  }

  function showCurl() {
    const text = curl(PATH, body());
    openDialog("curl", () => [el("pre", { class: "command", tabindex: 0 }, text), el("button", { type: "button", i18n: "copy", on: { click: () => copy(text).catch((error) => toast(error.message, "error")) } })]);
  }

  relabel();
  return { leave() {}, relabel };
}
