// All volumes: whose they are, whether they are whole, what is asked of them.

import { html, useState } from "/web/vendor/preact.js";
import { actions } from "./actions.js";
import { Badge, Table, useStore } from "./parts.js";
import { ratesFor, whole } from "./store.js";
import { bytes, rate, time } from "./words.js";

/** How safe a volume's data are, as far as the host that was asked can tell. */
export function safetyOf(volume) {
  if (!volume.live) return { word: "not told here", tone: "plain", rank: 1 };
  if (volume.live.at_risk_entries > 0) return { word: "at risk", tone: "critical", rank: 3 };
  if (volume.live.degraded_segments > 0) return { word: "degraded", tone: "warning", rank: 2 };
  return { word: "whole", tone: "good", rank: 0 };
}

export function takenBytes(volume) {
  const space = volume.live?.space;
  if (!space) return null;
  const { data_bytes, dead_bytes, kept_bytes, padding_bytes, redundancy_bytes, metadata_bytes } = space;
  return data_bytes + dead_bytes + kept_bytes + padding_bytes + redundancy_bytes + metadata_bytes;
}

/** The worse of both kinds of requests. */
function p99(volume) {
  const times = [volume.live?.read_times, volume.live?.write_times].filter(Boolean);
  return times.length ? Math.max(...times.map((of) => of.p99_us)) : null;
}

const orDash = (value, format) => (value === null || value === undefined ? "–" : format(value));
const requests = (volume) => {
  const of = ratesFor(volume);
  return of ? of.reads + of.writes : null;
};

const columns = [
  {
    key: "name",
    title: "Name",
    value: (volume) => volume.name,
    cell: (volume) => html`<a href=${`#/volume/${encodeURIComponent(volume.name)}`}>${volume.name}</a>`,
  },
  {
    key: "state",
    title: "State",
    value: (volume) => volume.state,
    cell: (volume) => html`<${Badge} word=${volume.orphaned ? "down" : volume.state} />`,
  },
  {
    key: "safety",
    title: "Redundancy",
    value: (volume) => -safetyOf(volume).rank,
    cell: (volume) => {
      const { word, tone } = safetyOf(volume);
      return html`<${Badge} word=${word} tone=${tone} /> <span class="quiet-text">${volume.layout}</span>`;
    },
  },
  { key: "host", title: "Owner", value: (volume) => volume.host ?? "", cell: (volume) => volume.host ?? "–" },
  {
    key: "size",
    title: "Size",
    isNumber: true,
    value: (volume) => volume.size_bytes,
    cell: (volume) => bytes(volume.size_bytes),
  },
  {
    key: "taken",
    title: "On devices",
    isNumber: true,
    value: (volume) => takenBytes(volume) ?? -1,
    cell: (volume) => orDash(volume.clone_of ? null : takenBytes(volume), bytes),
  },
  {
    key: "rate",
    title: "Requests",
    isNumber: true,
    value: (volume) => requests(volume) ?? -1,
    cell: (volume) => orDash(requests(volume), rate),
  },
  {
    key: "p99",
    title: "Slowest of 100",
    isNumber: true,
    value: (volume) => p99(volume) ?? -1,
    cell: (volume) => orDash(p99(volume), time),
  },
];

export function Volumes({ act }) {
  const { health, role } = useStore();
  const [wanted, setWanted] = useState("");
  const text = wanted.trim().toLowerCase();
  const is = (volume) => [volume.name, volume.host ?? "", volume.layout, volume.state].join(" ").toLowerCase().includes(text);
  const rows = (text ? health.volumes.filter(is) : health.volumes).map(whole);
  const typed = (event) => setWanted(event.target.value);
  const create = () => act(actions.create());
  const none = text ? "No volume has that in its name, owner, layout or state." : "There are no volumes yet.";
  return html`<section aria-labelledby="volumes">
      <header class="bar-of-tools">
        <h2 id="volumes">Volumes</h2>
        <input type="search" placeholder="Filter" aria-label="Filter volumes" value=${wanted} onInput=${typed} />
        ${role === "admin" && html`<button type="button" class="main" onClick=${create}>New volume</button>`}
      </header>
      ${rows.length > 0
        ? html`<${Table} title="Volumes" columns=${columns} rows=${rows} first="name" keyOf=${(volume) => volume.name} />`
        : html`<p class="quiet-text">${none}</p>`}
      ${health.deleting.length > 0 && html`<p class="quiet-text">Space is being returned of ${health.deleting.join(", ")}.</p>`}
    </section>
    <${Trash} trash=${health.trash} act=${act} />`;
}

function Trash({ trash, act }) {
  const { role } = useStore();
  if (trash.length === 0) return null;
  return html`<section aria-labelledby="trash">
    <h2 id="trash">Trash</h2>
    <ul class="tasks">
      ${trash.map(
        (of) =>
          html`<li key=${of.id}>
            <span>${of.name}, ${bytes(of.size_bytes)}</span>
            <span class="quiet-text">for ${Math.round(of.minutes_left / 60)} hours more</span>
            ${role === "admin" && html`<button type="button" onClick=${() => act(actions.restore(of))}>Restore</button>`}
          </li>`,
      )}
    </ul>
  </section>`;
}
