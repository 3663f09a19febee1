// Capacity: what there is, for how long, and where each byte is.

import { html } from "/web/vendor/preact.js";
import { Bar, Command } from "./parts.js";
import { bytes, percent } from "./words.js";

function daysText(days) {
  if (days === null || days === undefined) return "";
  if (days > 3650) return "; as it grows, for years";
  return `; as it grew in the last week, full in ${days < 1 ? "less than a day" : `${Math.round(days)} days`}`;
}

const sum = (named) => named.reduce((all, [, size]) => all + size, 0);

/** The lines of a part add up to it. */
function rowsOf(space) {
  const { used } = space;
  const of = (named, text) => named.map(([name, size]) => [text(name), size]);
  const inUse = [
    ...of(used.data, (name) => `data of ${name} and its clones`),
    ...of(used.snapshots, (name) => `held by snapshots of ${name} alone`),
    ...of(used.kept, (name) => `held by ${name} for its separate clones`),
    ["padding, between packed blocks", used.padding_bytes],
    ["copies and parity", used.redundancy_bytes],
    ["dead, until it is cleaned", used.dead_bytes],
    ["maps and checkpoints", used.metadata_bytes],
    ["in the trash", used.trash_bytes],
    ["headers, volumes not in service, on the way", used.other_bytes],
  ];
  return [
    { name: "journals, tables, superblocks", size: space.overhead_bytes },
    { name: "in use", size: space.used_bytes, parts: inUse },
    { name: "reserve for cleaning and deleting", size: space.reserve_bytes },
    { name: "not promised, so that cleaning stays cheap", size: space.spare_bytes },
    ...space.set_aside.map(([name, size]) => ({ name: `set aside for ${name}`, size })),
    { name: "free", size: space.free_bytes },
  ];
}

function Rows({ space }) {
  const line = (name, size, isPart) =>
    html`<tr class=${isPart ? "part" : ""}>
      <th scope="row">${name}</th>
      <td class="number">${size < 0 ? "-" : bytes(size)}</td>
      <td class="number">${percent(Math.max(size, 0), space.raw_bytes).toFixed(1)} %</td>
    </tr>`;
  const shown = rowsOf(space).flatMap(({ name, size, parts }) => [
    line(name, size, false),
    ...(parts ?? []).filter(([, size]) => size !== 0).map(([name, size]) => line(name, size, true)),
  ]);
  return html`<div class="table" tabindex="0"><table class="plain" aria-label="Where every byte is">
    <thead>
      <tr>
        <th scope="col">of all devices</th>
        <th scope="col" class="number">${bytes(space.raw_bytes)}</th>
        <th scope="col" class="number">100 %</th>
      </tr>
    </thead>
    <tbody>
      ${shown}
    </tbody>
  </table></div>`;
}

export function Space({ capacity }) {
  if (!capacity) return html`<p class="quiet-text">The host has not said yet.</p>`;
  const { used } = capacity;
  const data = sum(used.data) + sum(used.snapshots) + sum(used.kept);
  const parts = [
    { name: "data", size: data, tone: "data" },
    { name: "copies and parity", size: used.redundancy_bytes, tone: "copies" },
    { name: "all else in use", size: capacity.used_bytes - data - used.redundancy_bytes, tone: "other" },
    { name: "set aside for fixed volumes", size: sum(capacity.set_aside), tone: "aside" },
    {
      name: "journals and reserve",
      size: capacity.overhead_bytes + capacity.reserve_bytes + capacity.spare_bytes,
      tone: "reserve",
    },
  ];
  const text = `${bytes(capacity.used_bytes)} in use, ${bytes(capacity.free_bytes)} free${daysText(capacity.days_to_full)}`;
  return html`<p>${text}</p>
    <${Bar} parts=${parts} whole=${capacity.raw_bytes || 1} label=${text} />
    <ul class="legend">
      ${parts
        .filter((part) => part.size > 0)
        .map((part) => html`<li><span class="swatch ${part.tone}"></span>${part.name}: ${bytes(part.size)}</li>`)}
    </ul>
    <details>
      <summary>Where every byte is</summary>
      <${Rows} space=${capacity} />
      <${Command} text="holdfast space why" />
    </details>
    <details>
      <summary>What can be written, by layout</summary>
      <div class="table" tabindex="0"><table class="plain" aria-label="What can be written, by layout">
        <thead>
          <tr>
            <th scope="col">layout</th>
            <th scope="col" class="number">can be written</th>
            <th scope="col" class="number">of raw</th>
            <th scope="col">bears the loss of</th>
          </tr>
        </thead>
        <tbody>
          ${capacity.writable.map(
            (of) =>
              html`<tr>
                <th scope="row">${of.layout}</th>
                <td class="number">${bytes(of.bytes)}</td>
                <td class="number">${(of.efficiency * 100).toFixed(0)} %</td>
                <td>${of.bears}</td>
              </tr>`,
          )}
        </tbody>
      </table></div>
    </details>`;
}
