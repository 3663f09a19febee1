// Figures as people read them.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** `1.5 GiB` */
export function bytes(count) {
  let [value, unit] = [Math.abs(count), 0];
  while (value >= 1024 && unit < UNITS.length - 1) [value, unit] = [value / 1024, unit + 1];
  const digits = unit === 0 || value >= 100 ? 0 : 1;
  return `${count < 0 ? "-" : ""}${value.toFixed(digits).replace(/\.0$/, "")} ${UNITS[unit]}`;
}

/** A size as the command line takes it, without losing a byte: `10GiB`. */
export function sizeWord(count) {
  let [value, unit] = [count, 0];
  while (value > 0 && value % 1024 === 0 && unit < UNITS.length - 1) [value, unit] = [value / 1024, unit + 1];
  return unit === 0 ? `${value}` : `${value}${UNITS[unit]}`;
}

/** Bytes of `10 GiB`, `10G`, `1.5TiB`; NaN where it is no size. Rounded up to whole blocks of 4 KiB. */
export function bytesOf(text) {
  const found = /^\s*(\d+(?:\.\d+)?)\s*([kmgtp]?)(i?b)?\s*$/i.exec(text);
  if (!found) return NaN;
  const power = " kmgtp".indexOf(found[2].toLowerCase() || " ");
  return Math.ceil((Number(found[1]) * 1024 ** power) / 4096) * 4096;
}

/** `12.3 K` */
export function count(value) {
  if (value < 1000) return value < 10 && value % 1 ? value.toFixed(1) : `${Math.round(value)}`;
  return value < 1e6 ? `${(value / 1e3).toFixed(1)} K` : `${(value / 1e6).toFixed(1)} M`;
}

export function rate(value) {
  return `${count(value)}/s`;
}

/** `1.2 ms` */
export function time(us) {
  if (us < 1000) return `${Math.round(us)} µs`;
  return us < 1e6 ? `${(us / 1000).toFixed(us < 1e4 ? 1 : 0)} ms` : `${(us / 1e6).toFixed(1)} s`;
}

/** `3 h` */
export function span(seconds) {
  const steps = [
    [86400, "d"],
    [3600, "h"],
    [60, "min"],
  ];
  const [size, unit] = steps.find(([size]) => seconds >= size) ?? [1, "s"];
  return `${Math.floor(seconds / size)} ${unit}`;
}

export function percent(part, whole) {
  return whole > 0 ? (part / whole) * 100 : 0;
}

export function plural(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}

/** A name as a shell takes it. */
export function quoted(name) {
  return /^[\w@%+=:,./-]+$/.test(name) ? name : `'${name.replaceAll("'", `'\\''`)}'`;
}
