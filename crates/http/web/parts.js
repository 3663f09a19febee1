// Pieces that pages are made of.

import { html, useEffect, useRef, useState } from "/web/vendor/preact.js";
import { state, subscribe } from "./store.js";

/** What the page knows; who uses it is drawn anew when that changes. */
export function useStore() {
  const [, again] = useState(0);
  useEffect(() => subscribe(() => again((times) => times + 1)), []);
  return state;
}

const TONES = {
  up: "good",
  open: "good",
  serving: "good",
  forwarding: "good",
  elsewhere: "good",
  suspect: "warning",
  hung: "critical",
  down: "critical",
  cut: "warning",
  failing: "warning",
  slow: "warning",
  failed: "critical",
  missing: "critical",
  locked: "critical",
  deposed: "warning",
  critical: "critical",
  warning: "warning",
  cleared: "good",
};

/** A word with a colour beside it, never the colour alone. */
export function Badge({ word, tone }) {
  return html`<span class="badge ${tone ?? TONES[word] ?? "plain"}">${word}</span>`;
}

/** Parts of a whole, one behind the other; `parts` have a name, a size and a class. */
export function Bar({ parts, whole, label }) {
  let at = 0;
  const shown = parts
    .filter((part) => part.size > 0)
    .map((part) => {
      const width = (part.size / whole) * 100;
      const rect = html`<rect x=${at} width=${width} height="10" class=${part.tone}><title>${part.name}</title></rect>`;
      at += width;
      return rect;
    });
  return html`<svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label=${label}>
    <rect width="100" height="10" class="rest" />${shown}
  </svg>`;
}

/** A command that does the same, to be copied. */
export function Command({ text }) {
  const [isCopied, setCopied] = useState(false);
  const copy = () =>
    navigator.clipboard?.writeText(text).then(() => {
      setCopied(true);
      setTimeout(() => setCopied(false), 1500);
    });
  return html`<div class="command">
    <code tabindex="0">${text}</code>
    <button type="button" class="quiet" onClick=${copy} aria-label="Copy the command">${isCopied ? "copied" : "copy"}</button>
  </div>`;
}

/** A heading that sorts by its column. */
function Heading({ column, sort, onSort }) {
  const is = sort.key === column.key;
  const order = is ? (sort.down ? "descending" : "ascending") : "none";
  const turn = () => onSort({ key: column.key, down: is ? !sort.down : column.isNumber === true });
  return html`<th scope="col" aria-sort=${order} class=${column.isNumber ? "number" : ""}>
    <button type="button" class="heading" onClick=${turn}>
      ${column.title}<span aria-hidden="true">${is ? (sort.down ? " ▾" : " ▴") : ""}</span>
    </button>
  </th>`;
}

const ROWS_SHOWN = 50;

/**
 * A table that can be sorted and, where it is long, turned over.
 * @param {{title: string, columns: Array, rows: Array, first: string, keyOf: (row: any) => string}} of
 * columns: `{ key, title, isNumber, value(row), cell(row) }`, `value` being what is sorted by.
 */
export function Table({ title, columns, rows, first, keyOf }) {
  const [sort, setSort] = useState({ key: first, down: false });
  const [page, setPage] = useState(0);
  const by = columns.find((column) => column.key === sort.key) ?? columns[0];
  const order = (a, b) => {
    const [x, y] = [by.value(a), by.value(b)];
    const way = typeof x === "string" ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
    return (sort.down ? -way : way) || keyOf(a).localeCompare(keyOf(b), undefined, { numeric: true });
  };
  const sorted = [...rows].sort(order);
  const pages = Math.max(1, Math.ceil(rows.length / ROWS_SHOWN));
  const at = Math.min(page, pages - 1);
  const shown = sorted.slice(at * ROWS_SHOWN, (at + 1) * ROWS_SHOWN);
  const cells = (row) =>
    columns.map(
      (column, index) =>
        html`<td class=${column.isNumber ? "number" : ""} data-title=${column.title}>
          ${index === 0 ? html`<div class="row-name">${column.cell(row)}</div>` : column.cell(row)}
        </td>`,
    );
  return html`<div class="table" tabindex="0">
    <table aria-label=${title} aria-rowcount=${rows.length + 1}>
      <thead>
        <tr>
          ${columns.map((column) => html`<${Heading} key=${column.key} column=${column} sort=${sort} onSort=${setSort} />`)}
        </tr>
      </thead>
      <tbody>
        ${shown.map((row) => html`<tr key=${keyOf(row)}>${cells(row)}</tr>`)}
      </tbody>
    </table>
    ${pages > 1 &&
    html`<nav class="pages" aria-label=${`Pages of ${title}`}>
      <button type="button" disabled=${at === 0} onClick=${() => setPage(at - 1)}>Previous</button>
      <span>${at * ROWS_SHOWN + 1} to ${Math.min(rows.length, (at + 1) * ROWS_SHOWN)} of ${rows.length}</span>
      <button type="button" disabled=${at === pages - 1} onClick=${() => setPage(at + 1)}>Next</button>
    </nav>`}
  </div>`;
}

/** A dialog over the page; Escape and the button close it. */
export function Dialog({ title, onClose, children }) {
  const dialog = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    dialog.current.showModal();
    return () => before?.focus?.();
  }, []);
  return html`<dialog ref=${dialog} onClose=${onClose} aria-labelledby="dialog-title">
    <header>
      <h2 id="dialog-title">${title}</h2>
      <button type="button" class="quiet" onClick=${() => dialog.current.close()} aria-label="Close">✕</button>
    </header>
    ${children}
  </dialog>`;
}
