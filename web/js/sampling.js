// The sampling controls: empty means the server's default, which stands in the field as a hint.

import { el, field } from "./dom.js";
import { about } from "./about.js";

const FIELDS = [
  ["temperature", 0, 1000, 0.05],
  ["top_p", 0, 1, 0.05],
  ["top_k", -1, 65536, 1],
  ["min_p", 0, 1, 0.01],
  ["repetition_penalty", 0.01, 100, 0.05],
  ["alpha_presence", -100, 100, 0.1],
  ["alpha_frequency", -100, 100, 0.1],
  ["alpha_decay", 0, 1, 0.001],
  ["max_tokens", 1, 1048576, 1],
  ["seed", 0, 4294967295, 1],
];

/** A folded block of controls; `values()` is what a body takes from it. `preset` holds texts for some fields. */
export function samplingControls(preset = {}) {
  const inputs = new Map();
  const grid = el("div", { class: "fields" });
  for (const [name, min, max, step] of FIELDS) {
    const input = el("input", { type: "number", min, max, step: "any", name, inputmode: "decimal", value: preset[name] ?? "", "data-step": step });
    inputs.set(name, input);
    grid.append(field(name, input));
  }
  about().then(({ sampling_defaults: defaults }) => {
    for (const [name, input] of inputs) input.placeholder = defaults[name] ?? "—";
  }).catch(() => {});
  const node = el("details", { class: "sampling" }, el("summary", { i18n: "sampling" }), grid);
  return {
    node,
    values() {
      const values = {};
      for (const [name, input] of inputs) if (input.value !== "" && input.validity.valid) values[name] = Number(input.value);
      return values;
    },
  };
}
