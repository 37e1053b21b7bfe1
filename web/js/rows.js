// The rows of one batch: what has come so far, and how fast. Knows nothing of the screen.

export class Rows {
  /** `tokensPerPiece`: how many tokens one piece of a row stands for, the request's chunk_size. */
  constructor(prompts, tokensPerPiece) {
    this.prompts = prompts;
    this.texts = prompts.map(() => "");
    this.pieces = new Int32Array(prompts.length);
    this.finish = prompts.map(() => null);
    this.began = performance.now();
    this.ended = null;
    this.exact = null;
    this.numFinished = 0;
    this.firsts = new Float64Array(prompts.length);
    this.lasts = new Float64Array(prompts.length);
    this.tokensPerPiece = tokensPerPiece;
    this.changed = new Set();
  }

  /** Take one event of the stream. */
  take(event) {
    for (const choice of event.choices ?? []) {
      const { index } = choice;
      const piece = choice.delta?.content ?? "";
      if (piece) {
        this.lasts[index] = performance.now();
        if (!this.pieces[index]) this.firsts[index] = this.lasts[index];
        this.texts[index] += piece;
        this.pieces[index] += 1;
      }
      if (choice.finish_reason && !this.finish[index]) {
        this.finish[index] = choice.finish_reason;
        this.numFinished += 1;
      }
      this.changed.add(index);
    }
    if (event.usage) this.exact = event.usage.completion_tokens;
  }

  end() {
    this.ended ??= performance.now();
  }

  get seconds() {
    return ((this.ended ?? performance.now()) - this.began) / 1000;
  }

  /** Tokens of all rows: estimated from the pieces until the server says it. */
  get tokens() {
    if (this.exact !== null) return this.exact;
    let pieces = 0;
    for (const count of this.pieces) pieces += count;
    return pieces * this.tokensPerPiece;
  }

  /** Tokens a second of one row, from its first piece to its last; null before the second piece. */
  rate(index) {
    const since = (this.lasts[index] - this.firsts[index]) / 1000;
    return since > 0 ? ((this.pieces[index] - 1) * this.tokensPerPiece) / since : null;
  }

  /** One JSON object a line. */
  jsonl() {
    return this.prompts.map((prompt, index) => JSON.stringify({ index, prompt, text: this.texts[index], finish_reason: this.finish[index] })).join("\n") + "\n";
  }
}
