// Images of messages: read from files, kept as `{name, url}` with a data URL, and sent as content parts of a chat request.

import { element } from './dom.js';
import { bytes } from './words.js';

/** Maximum size of an image, in bytes, and maximum number of images of a message: the server's limits. */
const MAX_BYTES = 20 * 1024 * 1024;
const MAX_IMAGES = 64;
/** The formats that the server decodes, by the first bytes of a file: names and media types are often wrong. */
const FORMATS = [
  ['image/png', /^\x89PNG\r\n\x1a\n/],
  ['image/jpeg', /^\xff\xd8\xff/],
  ['image/gif', /^GIF8[79]a/],
  ['image/webp', /^RIFF[^]{4}WEBP/],
];
const FIRST_BYTES = 12;
const DATA_URL = /^data:image\/(?:png|jpeg|gif|webp);base64,/;

/** The media type of an image file that the server decodes; null for other files. */
export async function imageType(file) {
  const start = await file.slice(0, FIRST_BYTES).arrayBuffer().catch(() => new ArrayBuffer(0));
  const text = String.fromCharCode(...new Uint8Array(start));
  return FORMATS.find(([, magic]) => magic.test(text))?.[0] ?? null;
}

/** True if a file is an image by its name, SVG apart, which is text. */
export const isNamedImage = (file) => /^image\/(?!svg)/.test(file.type);

/** Why `file` cannot be an image of a message that has `count` of them, in one sentence; undefined if it can. */
export function imageRefusal(file, count) {
  if (file.size > MAX_BYTES) return `${file.name} is too large: an image may have ${bytes(MAX_BYTES)}.`;
  if (count >= MAX_IMAGES) return `${file.name} is left out: a message may have ${MAX_IMAGES} images.`;
  return undefined;
}

/** The data URL of a file; null if the file cannot be read. */
export function dataUrl(file, type) {
  return new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => resolve(null);
    reader.readAsDataURL(file.slice(0, file.size, type));
  });
}

/** A picture of an image, as small as the style makes it. */
export const thumbnail = ({ name, url }) => element('img', { src: url, alt: name, title: name, draggable: false });

/** The content of a user message: its text, or parts if there are images. */
export function contentOf({ prompt, images = [] }) {
  if (!images.length) return prompt;
  const text = prompt ? [{ type: 'text', text: prompt }] : [];
  return [...text, ...images.map(({ url }) => ({ type: 'image_url', image_url: { url } }))];
}

/** The `{prompt, images}` of a message's content; null if it has other parts, or images that are not in it. */
export function fromContent(content) {
  if (typeof content === 'string') return { prompt: content, images: [] };
  if (!Array.isArray(content)) return null;
  const texts = [];
  const images = [];
  for (const part of content) {
    const url = part?.image_url?.url;
    if (part?.type === 'text' && typeof part.text === 'string') texts.push(part.text);
    else if (part?.type === 'image_url' && DATA_URL.test(url)) images.push({ name: `Image ${images.length + 1}`, url });
    else return null;
  }
  return { prompt: texts.join('\n\n'), images };
}
