// The chats of this browser. The server keeps states and no texts, so texts live here; a node that the server has kept carries its
// number (`idx`), and any node can be continued from there without anything being read again.

import { call } from "./api.js";

const KEY = "rwkv_batch.chats";
const listeners = new Set();

/**
 * chat: { id, title, system, think, current, nodes: { key: node }, base }
 * node: { key, parent, question, answer, thought, idx, tokens, error, stopped, stats }; parent null: the chat's beginning
 * base: number of a node that the chat begins with (a session that was resumed), else 0
 */
let chats = load();
let selected = chats[0]?.id ?? null;

function load() {
  try {
    const found = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(found) ? found.filter((chat) => chat?.id && chat.nodes) : [];
  } catch {
    return [];
  }
}

export function save() {
  for (;;) {
    try {
      localStorage.setItem(KEY, JSON.stringify(chats));
      break;
    } catch {
      if (chats.length < 2) break; // the browser has no room: what is on screen stays
      chats.pop();
    }
  }
}

export function onChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function changed() {
  save();
  for (const listener of [...listeners]) listener();
}

function randomId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(6)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function all() {
  return chats;
}

export function current() {
  return chats.find((chat) => chat.id === selected) ?? null;
}

export function select(id) {
  selected = id;
  changed();
}

export function create({ title = "", base = 0, id = `chat-${randomId()}` } = {}) {
  const chat = { id, title, system: "", think: false, current: null, nodes: {}, base };
  chats.unshift(chat);
  selected = chat.id;
  changed();
  return chat;
}

/** Forget a chat here and its states on the server. */
export async function remove(chat) {
  await call("/state/delete", { body: { session_id: chat.id, delete_prefix: true } });
  chats = chats.filter((other) => other !== chat);
  if (selected === chat.id) selected = chats[0]?.id ?? null;
  changed();
}

export function addNode(chat, parent, question) {
  const node = { key: randomId(), parent, question, answer: "", thought: "", idx: null, tokens: 0, stats: null };
  chat.nodes[node.key] = node;
  chat.title ||= question.slice(0, 60);
  return node;
}

/** Take a turn out that came to nothing and that nothing follows. */
export function dropNode(chat, node) {
  delete chat.nodes[node.key];
  if (chat.current === node.key) chat.current = node.parent;
}

/** From the chat's beginning to `key`. */
export function path(chat, key = chat.current) {
  const nodes = [];
  for (let node = chat.nodes[key]; node; node = chat.nodes[node.parent]) nodes.unshift(node);
  return nodes;
}

export function children(chat, parent) {
  return Object.values(chat.nodes).filter((node) => node.parent === parent);
}

/** The last descendant of a node, first the newest ones: where a chat goes on that is switched to this branch. */
export function leaf(chat, key) {
  for (;;) {
    const below = children(chat, key);
    if (!below.length) return key;
    key = below[below.length - 1].key;
  }
}
