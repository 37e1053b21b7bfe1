// One turn of a dialogue: from the nearest node that the server has kept, with what was said since in front of the new question.

import { call, curl, events } from "./api.js";
import * as store from "./store.js";
import { t } from "./i18n.js";

const END = "</think>";

/** node key -> AbortController of all turns that run, whatever tab is open. */
export const running = new Map();

/** What is sent for a new turn below `parent`: the number of the kept node, and the prompt. */
export async function prepare(chat, parent, question) {
  const messages = [{ role: "user", content: question }];
  let node = chat.nodes[parent];
  for (; node && node.idx === null; node = chat.nodes[node.parent]) {
    if (!node.answer) continue; // what got no answer was not said
    messages.unshift({ role: "user", content: node.question }, { role: "assistant", content: node.answer });
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
export async function run(chat, node, sampling, show) {
  const controller = new AbortController();
  const { signal } = controller;
  running.set(node.key, controller);
  const began = performance.now();
  const think = chat.think;
  let first = null;
  let raw = "";
  let pieces = 0;
  let known = 0;
  const stats = (generated, read) => ({ generated, read, cached: known, first: ((first ?? began) - began) / 1000,
    rate: generated / Math.max((performance.now() - (first ?? began)) / 1000, 1e-3) });
  try {
    const { known: kept, ...prompt } = await prepare(chat, node.parent, node.question);
    known = kept;
    signal.throwIfAborted();
    const body = { ...prompt, ...sampling, stream: true, chunk_size: 1 };
    for await (const batch of events("/multi_state/chat/completions", body, signal)) {
      for (const event of batch) {
        if (event.dialogue_idx !== undefined) {
          node.idx = event.dialogue_idx;
          continue;
        }
        const choice = event.choices?.[0];
        const piece = choice?.delta?.content ?? "";
        if (piece) {
          first ??= performance.now();
          pieces += 1;
        }
        raw += piece;
        if (choice?.finish_reason) node.finish = choice.finish_reason;
        if (event.session) node.tokens = event.session.tokens;
        if (event.usage) node.stats = stats(event.usage.completion_tokens, event.usage.prompt_tokens);
      }
      Object.assign(node, split(raw, think));
      show();
    }
  } catch (error) {
    if (signal.aborted) node.stopped = true;
    else node.error = error.message || t("failed");
    if (pieces) node.stats = { ...stats(pieces, null), estimated: true };
  }
  running.delete(node.key);
  node.answer = node.answer.trimEnd();
  store.changed();
  show();
}

/** The same turn as a command. */
export async function command(chat, parent, question, sampling) {
  const { known, ...prompt } = await prepare(chat, parent, question);
  return curl("/multi_state/chat/completions", { ...prompt, ...sampling, stream: true }, true);
}
