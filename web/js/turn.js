// One turn of a dialogue: from the nearest node that the server has kept, with what was said since in front of the new question.

import { call, curl, events } from "./api.js";
import * as store from "./store.js";
import { t } from "./i18n.js";

const END = "</think>";

/** What is sent for a new turn below `parent`: the number of the kept node, and the prompt. */
export async function prepare(chat, parent, question) {
  const messages = [{ role: "user", content: question }];
  let node = chat.nodes[parent];
  for (; node && node.idx === null; node = chat.nodes[node.parent]) {
    if (node.answer) messages.unshift({ role: "assistant", content: node.answer });
    messages.unshift({ role: "user", content: node.question });
  }
  if (!node && !chat.base && chat.system) messages.unshift({ role: "system", content: chat.system });
  const { prompt } = await call("/apply_template", { body: { messages, enable_think: chat.think } });
  return { session_id: chat.id, dialogue_idx: node ? node.idx : chat.base, contents: [prompt], known: node ? node.tokens : chat.baseTokens ?? 0 };
}

/** Split what a model that thinks has written so far. */
export function split(text, think) {
  if (!think) return { thought: "", answer: text.trimStart() };
  const begun = text.trimStart().replace(/^>/, "").trimStart();
  const end = begun.indexOf(END);
  if (end < 0) return { thought: begun, answer: "" };
  return { thought: begun.slice(0, end).trimEnd(), answer: begun.slice(end + END.length).trimStart() };
}

/** Run one turn into `node`; `show` is called as text comes. Never raises: what went wrong stands in the node. */
export async function run(chat, node, sampling, signal, show) {
  const began = performance.now();
  const think = chat.think;
  let first = null;
  let raw = "";
  try {
    const { known, ...prompt } = await prepare(chat, node.parent, node.question);
    const body = { ...prompt, ...sampling, stream: true, chunk_size: 1 };
    for await (const batch of events("/multi_state/chat/completions", body, signal)) {
      for (const event of batch) {
        if (event.dialogue_idx !== undefined) {
          node.idx = event.dialogue_idx;
          continue;
        }
        const piece = event.choices?.[0]?.delta?.content ?? "";
        if (piece) first ??= performance.now();
        raw += piece;
        if (event.session) node.tokens = event.session.tokens;
        if (event.usage) {
          const seconds = (performance.now() - (first ?? began)) / 1000;
          node.stats = { generated: event.usage.completion_tokens, read: event.usage.prompt_tokens, cached: known,
            rate: event.usage.completion_tokens / Math.max(seconds, 1e-3), first: ((first ?? began) - began) / 1000 };
        }
      }
      Object.assign(node, split(raw, think));
      show();
    }
  } catch (error) {
    if (signal.aborted) node.stopped = true;
    else node.error = error.message || t("failed");
  }
  node.answer = node.answer.trimEnd();
  store.changed();
  show();
}

/** The same turn as a command. */
export async function command(chat, parent, question, sampling) {
  const { known, ...prompt } = await prepare(chat, parent, question);
  return curl("/multi_state/chat/completions", { ...prompt, ...sampling, stream: true }, true);
}
