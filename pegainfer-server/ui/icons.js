// Icons of buttons, as outlines in a square of 24.

import { element, svg } from './dom.js';

const PATHS = {
  attach: 'M20 11.5 12 19.5a5 5 0 0 1-7-7l8.5-8.5a3.4 3.4 0 0 1 4.8 4.8L9.8 17.3a1.7 1.7 0 0 1-2.4-2.4L15 7.3',
  check: 'M5 12.5 10 17.5 19.5 7',
  chats: 'M4 6h16M4 12h16M4 18h10',
  close: 'M6 6 18 18M18 6 6 18',
  copy: 'M9 9h10v11H9zM15 9V4H5v11h4',
  cross: 'M12 7v6M12 16.5v.5M12 3l10 18H2z',
  edit: 'M4 20l1-4L16.5 4.5l3 3L8 19z',
  new: 'M12 5v14M5 12h14',
  remove: 'M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13M10.5 11v5M13.5 11v5',
  resend: 'M19 8a8 8 0 1 0 1 6M20 4v5h-5',
  send: 'M12 20V5M5.5 11.5 12 5l6.5 6.5',
  settings: 'M4 7h9M17 7h3M4 17h3M11 17h9M15 4.5v5M9 14.5v5',
  stop: 'M7 7h10v10H7z',
  tokens: 'M4 6h6v12H4zM14 6h6v5h-6zM14 15h6v3h-6z',
};

export function icon(name) {
  return svg('svg', { viewBox: '0 0 24 24', class: 'icon', 'aria-hidden': 'true' }, svg('path', { d: PATHS[name] }));
}

/** A button with an icon, whose name is read aloud and shown as a hint. */
export function iconButton(name, label, click) {
  const made = element('button', { type: 'button', className: 'small', ariaLabel: label, title: label }, icon(name));
  made.addEventListener('click', click);
  return made;
}

/** Puts an icon into each button of the document that names one in `data-icon`, before its text. */
export function fillIcons() {
  for (const button of document.querySelectorAll('[data-icon]')) button.prepend(icon(button.dataset.icon));
}
