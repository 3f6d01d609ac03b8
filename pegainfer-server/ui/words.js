// Numbers as text.

/** A count with its noun, such as `1 token` or `8 tokens`. */
export function count(n, thing) {
  return `${n} ${thing}${n === 1 ? '' : 's'}`;
}

/** A duration in milliseconds, with about three digits. */
export function milliseconds(time) {
  return `${time.toFixed(time < 10 ? 2 : time < 100 ? 1 : 0)} ms`;
}

/** A size of a file, such as `12 bytes` or `3.1 KiB`. */
export function bytes(n) {
  return n < 1024 ? count(n, 'byte') : `${(n / 1024).toFixed(n < 10240 ? 1 : 0)} KiB`;
}
