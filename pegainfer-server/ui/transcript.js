// A conversation as a file: as Markdown to read, with the names of images, and as JSON to read and to import. The JSON has the
// form of a chat request: `{model, messages}`, with the reasoning of a response in `reasoning_content`.

import { element } from './dom.js';
import { contentOf, fromContent } from './images.js';

/** Text of a Markdown file. `turns`: `[{prompt, images, content, reasoning}]`. */
export function toMarkdown({ model, system, turns }) {
  const section = (title, text) => (text ? [`## ${title}\n\n${text}`] : []);
  const quote = (text) => text && text.trim().replace(/^/gm, '> ');
  const names = (images = []) => images.map(({ name }) => `(Image: ${name})`);
  const parts = turns.flatMap(({ prompt, images, content, reasoning }) => [
    ...section('User', [...names(images), ...(prompt ? [prompt] : [])].join('\n\n')),
    ...section('Reasoning', quote(reasoning)),
    ...section('Assistant', content),
  ]);
  return `${[`# Conversation with ${model}`, ...section('System', system), ...parts].join('\n\n')}\n`;
}

/** Text of a JSON file. */
export function toJson({ model, system, turns }) {
  const messages = turns.flatMap((turn) => [
    { role: 'user', content: contentOf(turn) },
    { role: 'assistant', content: turn.content, ...(turn.reasoning && { reasoning_content: turn.reasoning }) },
  ]);
  const all = [...(system ? [{ role: 'system', content: system }] : []), ...messages];
  return `${JSON.stringify({ model, messages: all }, null, 2)}\n`;
}

/** The `{system, turns}` of a JSON file. Throws an `Error` whose message says in one sentence what is wrong. */
export function fromJson(text) {
  const messages = parse(text)?.messages;
  if (!Array.isArray(messages)) throw new Error('The file has no list of messages.');
  const isText = (message) => typeof message?.content === 'string';
  const isRead = (message) => isText(message) || (message?.role === 'user' && fromContent(message.content) !== null);
  const odd = messages.findIndex((message) => !isRead(message));
  if (odd >= 0) throw new Error(`The content of message ${odd + 1} is not a text, nor a user's text with images as data URLs.`);
  const system = messages[0]?.role === 'system' ? messages[0].content : '';
  const rest = messages.slice(messages[0]?.role === 'system' ? 1 : 0);
  const turns = [];
  for (let at = 0; at < rest.length; at += 2) turns.push(turn(rest[at], rest[at + 1]));
  return { system, turns };
}

function turn(user, assistant) {
  if (user.role !== 'user' || assistant?.role !== 'assistant') {
    throw new Error('The messages must be a user message and its response, and so on, after at most one system message.');
  }
  const reasoning = assistant.reasoning_content;
  return { ...fromContent(user.content), content: assistant.content, reasoning: typeof reasoning === 'string' ? reasoning : '' };
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error('The file is not JSON.');
  }
}

/** Lets the browser save `text` as the file `name`. */
export function download(name, type, text) {
  const href = URL.createObjectURL(new Blob([text], { type }));
  const link = element('a', { href, download: name });
  link.click();
  // A browser may read the text only after the click.
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
}
