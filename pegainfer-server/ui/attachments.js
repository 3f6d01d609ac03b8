// Files of a message. A text file is part of the message's text: `File: NAME`, and its content in a fenced code block. Images
// stand next to the text.

import { byId, chooseFiles, element } from './dom.js';
import { dataUrl, imageRefusal, imageType, isNamedImage, thumbnail } from './images.js';
import { bytes } from './words.js';

/** Maximum size of all text files of one message, in bytes. */
const LIMIT = 256 * 1024;
/** A file as `withFiles` writes it. Its fence is longer than any run of backticks in the content. */
const FILE = /^File: (.+)\n(`{3,})\n([^]*?)\n\2(?:\n\n|$)/;

/** `text` with `files`, `[{name, content}]`, before it: models answer best to a question that follows its material. */
export function withFiles(text, files) {
  const blocks = files.map(({ name, content }) => {
    const runs = content.match(/`{3,}/g) ?? [];
    const fence = '`'.repeat(runs.reduce((longest, run) => Math.max(longest, run.length), 2) + 1);
    return `File: ${name}\n${fence}\n${content.replace(/\n$/, '')}\n${fence}`;
  });
  return [...blocks, ...(text ? [text] : [])].join('\n\n');
}

/** Splits a message into its text and the files before it. */
export function splitFiles(message) {
  const files = [];
  let text = message;
  for (let found = FILE.exec(text); found; found = FILE.exec(text)) {
    files.push({ name: found[1], content: found[3] });
    text = text.slice(found[0].length);
  }
  return { text, files };
}

/** The files that will be sent with the next message: chosen with a button, dropped on the window, or pasted. */
export class Attachments {
  #files = [];
  /** Images, `{name, size, url}`. */
  #images = [];
  #models;
  #list = byId('attached');
  #error = byId('attach-error');

  /** `models` tells whether the chosen model reads images. */
  constructor(models) {
    this.#models = models;
    chooseFiles(byId('attach'), byId('file-chooser'), (files) => this.#add(files));
    const hasFiles = (event) => event.dataTransfer?.types.includes('Files');
    document.addEventListener('dragover', (event) => {
      if (hasFiles(event)) event.preventDefault();
    });
    document.addEventListener('drop', (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.#add([...event.dataTransfer.files]);
    });
    document.addEventListener('paste', (event) => {
      const { files, types } = event.clipboardData ?? {};
      // Word processors copy a picture of the text as well.
      if (!files?.length || types.includes('text/plain')) return;
      event.preventDefault();
      this.#add([...files]);
    });
  }

  get files() {
    return this.#files;
  }

  get images() {
    return this.#images.map(({ name, url }) => ({ name, url }));
  }

  /** Attaches the images of a message that could not be sent. */
  set images(images) {
    this.#images = images;
    this.#show('');
  }

  /** Why the images cannot be sent, in one sentence; an empty text if they can. */
  get refusal() {
    if (!this.#images.length || this.#models.readsImages) return '';
    return `${this.#models.name} reads no images: remove them, or choose another model.`;
  }

  clear() {
    this.#files = [];
    this.#images = [];
    this.#show('');
  }


  async #add(chosen) {
    const refusals = [];
    for (const file of chosen) {
      const refusal = await this.#read(file);
      if (refusal) refusals.push(refusal);
    }
    this.#show(refusals.join(' '));
    byId('prompt').focus();
  }

  /** Attaches one file; returns why it cannot be attached, in one sentence. */
  async #read(file) {
    const type = await imageType(file);
    const isImage = type !== null || isNamedImage(file);
    if (isImage && !this.#models.readsImages) {
      return `${file.name} is an image, which ${this.#models.name ?? 'the model'} does not read.`;
    }
    if (type) return this.#readImage(file, type);
    if (isImage) return `${file.name} is not a PNG, JPEG, WebP or GIF image.`;
    return this.#readText(file);
  }

  async #readImage(file, type) {
    const refusal = imageRefusal(file, this.#images.length);
    if (refusal) return refusal;
    const url = await dataUrl(file, type);
    if (url === null) return `${file.name} cannot be read.`;
    this.#images.push({ name: file.name, size: file.size, url });
    return undefined;
  }

  async #readText(file) {
    const total = this.#files.reduce((sum, { size }) => sum + size, file.size);
    if (total > LIMIT) return `${file.name} is too large: the text files of one message may have ${bytes(LIMIT)} together.`;
    const content = decode(await file.arrayBuffer().catch(() => null));
    if (content === null) return `${file.name} is not a text file in UTF-8.`;
    this.#files.push({ name: file.name.replace(/\s+/g, ' '), size: file.size, content });
    return undefined;
  }

  #show(error) {
    this.#error.textContent = error;
    const images = this.#images.map((image) => this.#entry(image, thumbnail(image)));
    this.#list.replaceChildren(...images, ...this.#files.map((file) => this.#entry(file)));
  }

  /** A line of the list, after a `picture` if the file is an image. */
  #entry(file, ...picture) {
    const remove = element('button', { type: 'button', className: 'small', ariaLabel: `Remove ${file.name}` }, 'Remove');
    remove.addEventListener('click', () => {
      this.#files = this.#files.filter((other) => other !== file);
      this.#images = this.#images.filter((other) => other !== file);
      this.#show('');
      byId('attach').focus();
    });
    const size = file.size ? `, ${bytes(file.size)}` : '';
    return element('li', {}, ...picture, `${file.name}${size} `, remove);
  }
}

/** The text of a file with `\n` as line end; null if it is not text. */
function decode(buffer) {
  if (buffer === null) return null;
  try {
    const text = new TextDecoder('utf-8', { fatal: true }).decode(buffer);
    return text.includes('\0') ? null : text.replace(/\r\n?/g, '\n');
  } catch {
    return null;
  }
}
