// A response arrives in segments, `{text, tokens}`: usually one token each, with its probabilities if they were requested.
// Tags such as <think> and ``` may be spread over several segments, so text that may become one is held back.

/** A queue of segments that is read by characters. */
class Held {
  #segments = [];
  text = '';

  push(segment) {
    this.#segments.push(segment);
    this.text += segment.text;
  }

  /** Removes the first `length` characters; returns the segments that they consist of. */
  take(length) {
    this.text = this.text.slice(length);
    const taken = [];
    while (this.#segments.length && (length > 0 || this.#segments[0].text === '')) {
      const segment = this.#segments[0];
      if (segment.text.length <= length) {
        taken.push(this.#segments.shift());
      } else {
        taken.push({ ...segment, text: segment.text.slice(0, length) });
        this.#segments[0] = { ...segment, text: segment.text.slice(length) };
      }
      length -= taken.at(-1).text.length;
    }
    return taken;
  }
}

const OPEN = '<think>';
const CLOSE = '</think>';

/** Splits reasoning in <think>...</think> from content. `sink`: `reason(segments)`, `write(segments)`, `reclassify()`. */
export class ReasoningSplitter {
  #held = new Held();
  #sink;
  #inside = false;
  #closed = false;
  #hasContent = false;

  constructor(sink) {
    this.#sink = sink;
  }

  push(segment) {
    this.#held.push(segment);
    while (!this.#closed) {
      const tag = this.#nextTag();
      if (!tag) return this.#emit(this.#held.text.length - partial(this.#held.text));
      this.#emit(tag.at);
      this.#held.take(tag.name.length);
      // Some templates open the block in the prompt: then everything so far was reasoning.
      if (tag.name === CLOSE && !this.#inside) this.#sink.reclassify();
      this.#inside = tag.name === OPEN;
      this.#closed = tag.name === CLOSE;
    }
    this.#emit(this.#held.text.length);
  }

  /** Ends the response. */
  end() {
    this.#emit(this.#held.text.length);
  }

  /** The next tag. Tags count only before the content; later they are text about tags. */
  #nextTag() {
    const text = this.#held.text;
    const opens = !this.#inside && !this.#hasContent && text.trimStart().startsWith(OPEN);
    const name = opens ? OPEN : CLOSE;
    const at = text.indexOf(name);
    return at < 0 ? null : { name, at };
  }

  #emit(length) {
    const segments = this.#held.take(length);
    if (!segments.length) return;
    if (this.#inside) return this.#sink.reason(segments);
    this.#hasContent ||= segments.some(({ text }) => text.trim());
    this.#sink.write(segments);
  }
}

/** Length of the longest suffix of `text` that may become a tag. */
function partial(text) {
  const longest = (tag) => {
    let length = Math.min(tag.length - 1, text.length);
    while (length > 0 && !text.endsWith(tag.slice(0, length))) length -= 1;
    return length;
  };
  return Math.max(longest(OPEN), longest(CLOSE));
}

/** Splits code between lines that start with ``` from text. `sink`: `write(segments)`, `openCode()`, `closeCode()`. */
export class FenceSplitter {
  #held = new Held();
  #sink;
  #code = false;
  #lineStart = true;

  constructor(sink) {
    this.#sink = sink;
  }

  push(segment) {
    this.#held.push(segment);
    this.#drain(false);
  }

  end() {
    this.#drain(true);
  }

  #drain(atEnd) {
    for (;;) {
      // A line break is put before the text at the start of a line, so that every line starts after one.
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
    const segments = this.#held.take(length);
    if (!segments.length) return;
    const last = segments.findLast(({ text }) => text);
    if (last) this.#lineStart = last.text.endsWith('\n');
    this.#sink.write(segments);
  }
}

/** Length of the held text (`text` without its first character) up to where a fence may begin. */
function certain(text) {
  const line = text.lastIndexOf('\n');
  const mayBeFence = line >= 0 && /^(`{1,2}|```.*)$/.test(text.slice(line + 1));
  return mayBeFence ? line : text.length - 1;
}
