// Copies text to the clipboard.

import { element } from './dom.js';

/** Milliseconds for which a button tells that it has copied. */
const SHOWN = 1500;

/** A button that copies what `text()` returns. */
export function copyButton(name, text) {
  const button = element('button', { type: 'button', className: 'small', ariaLabel: name, ariaLive: 'polite' }, 'Copy');
  button.addEventListener('click', async () => {
    button.textContent = (await copy(text())) ? 'Copied' : 'Not copied';
    setTimeout(() => {
      button.textContent = 'Copy';
    }, SHOWN);
  });
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
