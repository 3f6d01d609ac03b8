// Keeps the end of a growing response in view, unless the user has scrolled away from it.

/** Distance from the end, in pixels, within which the view follows. */
const NEAR_END = 80;

export function follow(log) {
  let isNear = true;
  let isDue = false;
  log.addEventListener('scroll', () => {
    isNear = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_END;
  });
  const scroll = () => {
    isDue = false;
    log.scrollTop = log.scrollHeight;
  };
  // Once a frame: reading the height after every token would lay out the whole response each time.
  const grown = () => {
    if (!isNear || isDue) return;
    isDue = true;
    requestAnimationFrame(scroll);
  };
  new MutationObserver(grown).observe(log, { childList: true, subtree: true, characterData: true });
}
