// Answers come in pieces, `{text, tokens}`: usually one token each, with its probabilities if they were asked for.
// Marks such as <think> and ``` may be spread over several pieces, so text that may become one is held back.

/** A queue of pieces that is read by characters. */
class Held {
  #pieces = [];
  text = '';

  push(piece) {
    this.#pieces.push(piece);
    this.text += piece.text;
  }

  /** Removes the first `length` characters; gives the pieces that make them up. */
  take(length) {
    this.text = this.text.slice(length);
    const taken = [];
    while (this.#pieces.length && (length > 0 || this.#pieces[0].text === '')) {
      const piece = this.#pieces[0];
      if (piece.text.length <= length) {
        taken.push(this.#pieces.shift());
      } else {
        taken.push({ ...piece, text: piece.text.slice(0, length) });
        this.#pieces[0] = { ...piece, text: piece.text.slice(length) };
      }
      length -= taken.at(-1).text.length;
    }
    return taken;
  }
}

const OPEN = '<think>';
const CLOSE = '</think>';

/** Parts thoughts in <think>...</think> from the answer. `sink`: `think(pieces)`, `answer(pieces)`, `rethink()`. */
export class ThinkSplitter {
  #held = new Held();
  #sink;
  #thinking = false;
  #thought = false;
  #answered = false;

  constructor(sink) {
    this.#sink = sink;
  }

  push(piece) {
    this.#held.push(piece);
    while (!this.#thought) {
      const tag = this.#nextTag();
      if (!tag) return this.#emit(this.#held.text.length - partial(this.#held.text));
      this.#emit(tag.at);
      this.#held.take(tag.name.length);
      // Some templates open the block in the prompt: then all that came so far was thought.
      if (tag.name === CLOSE && !this.#thinking) this.#sink.rethink();
      this.#thinking = tag.name === OPEN;
      this.#thought = tag.name === CLOSE;
    }
    this.#emit(this.#held.text.length);
  }

  /** No more pieces will come. */
  end() {
    this.#emit(this.#held.text.length);
  }

  /** Tags count where a model thinks, before its answer; later they are text about tags. */
  #nextTag() {
    const text = this.#held.text;
    const opens = !this.#thinking && !this.#answered && text.trimStart().startsWith(OPEN);
    const name = opens ? OPEN : CLOSE;
    const at = text.indexOf(name);
    return at < 0 ? null : { name, at };
  }

  #emit(length) {
    const pieces = this.#held.take(length);
    if (!pieces.length) return;
    if (this.#thinking) return this.#sink.think(pieces);
    this.#answered ||= pieces.some(({ text }) => text.trim());
    this.#sink.answer(pieces);
  }
}

/** Length of the longest end of `text` that may become a tag. */
function partial(text) {
  const longest = (tag) => {
    let length = Math.min(tag.length - 1, text.length);
    while (length > 0 && !text.endsWith(tag.slice(0, length))) length -= 1;
    return length;
  };
  return Math.max(longest(OPEN), longest(CLOSE));
}

/** Parts text from code between lines that start with ```. `sink`: `write(pieces)`, `openCode()`, `closeCode()`. */
export class FenceSplitter {
  #held = new Held();
  #sink;
  #code = false;
  #lineStart = true;

  constructor(sink) {
    this.#sink = sink;
  }

  push(piece) {
    this.#held.push(piece);
    this.#drain(false);
  }

  end() {
    this.#drain(true);
  }

  #drain(atEnd) {
    for (;;) {
      // The character before the text, so that every line starts after a line break.
      const text = (this.#lineStart ? '\n' : ' ') + this.#held.text;
      const fence = this.#fence(atEnd).exec(text);
      if (!fence) return this.#write(atEnd ? this.#held.text.length : certain(text));
      this.#write(fence.index);
      this.#held.take(fence[0].length - 1);
      this.#lineStart = true;
      this.#code = !this.#code;
      if (this.#code) this.#sink.openCode();
      else this.#sink.closeCode();
    }
  }

  #fence(atEnd) {
    if (!this.#code) return /\n```[^\n`]*\n/;
    return atEnd ? /\n```[ \t]*(?:\n|$)/ : /\n```[ \t]*\n/;
  }

  #write(length) {
    const pieces = this.#held.take(length);
    if (!pieces.length) return;
    const last = pieces.findLast(({ text }) => text);
    if (last) this.#lineStart = last.text.endsWith('\n');
    this.#sink.write(pieces);
  }
}

/** Length of the held text, which is `text` without its first character, that no fence can begin in. */
function certain(text) {
  const line = text.lastIndexOf('\n');
  const mayBeFence = line >= 0 && /^(`{1,2}|```.*)$/.test(text.slice(line + 1));
  return mayBeFence ? line : text.length - 1;
}
