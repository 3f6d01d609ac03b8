// A response arrives in segments, `{text, tokens}`: usually one token each, with its probabilities if they were requested.
// Tags such as <think> may be spread over several segments, so text that may become one is held back.

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
