// Numbers as text.

/** A count with its noun, such as `1 token` or `8 tokens`. */
export function count(n, thing) {
  return `${n} ${thing}${n === 1 ? '' : 's'}`;
}

/** A duration in milliseconds, with about three digits. */
export function milliseconds(time) {
  return `${time.toFixed(time < 10 ? 2 : time < 100 ? 1 : 0)} ms`;
}

/** A size, such as `12 bytes`, `3.1 KiB` or `7.5 GiB`. */
export function bytes(n) {
  if (n < 1024) return count(n, 'byte');
  const power = Math.min(Math.floor(Math.log2(n) / 10), 4);
  const value = n / 1024 ** power;
  return `${value.toFixed(value < 10 ? 1 : 0)} ${['', 'KiB', 'MiB', 'GiB', 'TiB'][power]}`;
}
