// Copies text to the clipboard.

import { element } from './dom.js';
import { icon, iconButton } from './icons.js';

/** Milliseconds for which a button tells that it has copied. */
const SHOWN = 1500;

/** A button that copies what `text()` returns. */
export function copyButton(name, text) {
  const said = element('span', { className: 'unseen', ariaLive: 'polite' });
  const show = (shown, words) => {
    button.replaceChildren(icon(shown), said);
    said.textContent = words;
  };
  const button = iconButton('copy', name, async () => {
    const copied = await copy(text());
    show(copied ? 'check' : 'cross', copied ? 'Copied' : 'Not copied');
    setTimeout(() => show('copy', ''), SHOWN);
  });
  button.append(said);
  return button;
}

/** Returns whether the text was copied. */
async function copy(text) {
  try {
    // Browsers offer this only on this machine and over HTTPS.
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    return navigator.clipboard ? true : copySelected(text);
  } catch {
    return false;
  }
}

/** The older way: selects the text in a hidden field, and gives the focus back. */
function copySelected(text) {
  const focused = document.activeElement;
  const field = element('textarea', { className: 'unseen', value: text });
  document.body.append(field);
  field.select();
  const copied = document.execCommand('copy');
  field.remove();
  focused?.focus();
  return copied;
}
