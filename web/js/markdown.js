// Model text as Markdown. What comes out of here is the only HTML the page takes from a model, and it has been through DOMPurify.

import { marked } from "../vendor/marked-18.2.1.js";
import DOMPurify from "../vendor/purify-3.4.18.js";

const TAGS = ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "strong", "em", "del", "code", "pre",
  "blockquote", "table", "thead", "tbody", "tr", "th", "td", "a"];
const RULES = { ALLOWED_TAGS: TAGS, ALLOWED_ATTR: ["href", "start"], ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false, ALLOW_ARIA_ATTR: false, RETURN_DOM_FRAGMENT: true };

const renderer = {
  html: ({ text }) => escape(text), // tags that a model writes are text
  image: ({ text, href }) => escape(text || href), // a picture would tell its host who reads
};

marked.use({ gfm: true, breaks: true, renderer });

function escape(text) {
  return text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);
}

const RENDERED = 200_000; // characters; a longer text stays plain

/** A fragment that shows `text`. */
export function render(text) {
  if (text.length > RENDERED) return plain(text);
  let fragment;
  try {
    fragment = DOMPurify.sanitize(marked.parse(text), RULES);
  } catch {
    return plain(text); // nested too deeply for the parser
  }
  for (const link of fragment.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer nofollow";
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = document.createElement("div");
    frame.className = "scroll";
    frame.tabIndex = 0;
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const code of fragment.querySelectorAll("pre")) code.tabIndex = 0; // so that a keyboard can scroll it
  return fragment;
}

function plain(text) {
  const node = document.createElement("div");
  node.className = "plain";
  node.textContent = text;
  return node;
}
