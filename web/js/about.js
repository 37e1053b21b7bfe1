// What the server says of itself, asked once.

import { call } from "./api.js";

let answer = null;

/** Name, version, model, limits and sampling defaults. */
export function about() {
  answer ??= call("/").catch((error) => {
    answer = null;
    throw error;
  });
  return answer;
}
