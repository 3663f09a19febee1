// One volume: its figures, its snapshots, why it is slow, what can be done to it.

import { html, useEffect, useState } from "/web/vendor/preact.js";
import { actions } from "./actions.js";
import { ask, path } from "./ask.js";
import { Badge, Command, useStore } from "./parts.js";
import { ratesFor, whole } from "./store.js";
import { safetyOf, takenBytes } from "./volumes.js";
import { bytes, quoted, rate, time } from "./words.js";

const LOOK_MS = 5000;

/** A resource that is looked at again and again: `[told, trouble]`. */
function useLook(of, when) {
  const [told, setTold] = useState([null, null]);
  useEffect(() => {
    let isOver = false;
    const look = () =>
      ask("GET", of).then(
        (found) => isOver || setTold([found, null]),
        (error) => isOver || setTold([null, error.message]),
      );
    look();
    const timer = setInterval(look, LOOK_MS);
    return () => {
      isOver = true;
      clearInterval(timer);
    };
  }, [of, when]);
  return told;
}

function Facts({ volume }) {
  const safety = safetyOf(volume);
  const of = ratesFor(volume);
  const times = (of) => (of ? `${time(of.p50_us)} half, ${time(of.p99_us)} slowest of 100` : "none of late");
  const taken = takenBytes(volume);
  const kept = [volume.provisioning, volume.compression !== "off" && volume.compression, volume.encrypted && "encrypted"];
  const facts = [
    ["State", html`<${Badge} word=${volume.state} /> ${volume.waits ?? ""}`],
    ["Redundancy", html`<${Badge} word=${safety.word} tone=${safety.tone} /> ${volume.layout}`],
    ["Owner", volume.host ?? "no host has it in service"],
    ["Size", bytes(volume.size_bytes)],
    volume.clone_of && ["Clone of", volume.clone_of],
    taken !== null && ["On devices", bytes(taken)],
    of && ["Requests", `${rate(of.reads)} reads, ${rate(of.writes)} writes`],
    volume.live && ["Reads", times(volume.live.read_times)],
    volume.live && ["Writes", times(volume.live.write_times)],
    ["Clients", `${volume.sessions}`],
    ["Limits", volume.limit ?? "none"],
    ["Kept", kept.filter(Boolean).join(", ")],
    volume.uris.length > 0 && ["Clients connect to", html`<code>${volume.uris.join("\n")}</code>`],
  ].filter(Boolean);
  return html`<dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

function Kind({ name, kind, verdict }) {
  if (!verdict) return null;
  const stages = (kind?.stages ?? []).filter((stage) => stage.p99_us > 0 || stage.slow_us > 0);
  return html`<h3>${name}</h3>
    <p class="verdict">${verdict.text}</p>
    <div class="table" tabindex="0"><table class="plain" aria-label=${`Stages of ${name}`}>
      <thead>
        <tr>
          <th scope="col">stage</th>
          <th scope="col" class="number">half</th>
          <th scope="col" class="number">slowest of 100</th>
          <th scope="col" class="number">of the slow</th>
        </tr>
      </thead>
      <tbody>
        ${stages.map(
          (stage) =>
            html`<tr>
              <th scope="row" title=${stage.about}>${stage.stage}</th>
              <td class="number">${time(stage.p50_us)}</td>
              <td class="number">${time(stage.p99_us)}</td>
              <td class="number">${(stage.slow_per_mille / 10).toFixed(0)} %</td>
            </tr>`,
        )}
      </tbody>
    </table></div>`;
}

function Slow({ name }) {
  const [told, trouble] = useLook(path("volumes", name, "slow"), name);
  const slow = told?.slow;
  return html`<section aria-labelledby="slow">
    <h2 id="slow">Why slow</h2>
    ${trouble && html`<p class="quiet-text">${trouble}</p>`}
    ${told && !slow && html`<p class="quiet-text">This host counts nothing of it: the one that has it in service does.</p>`}
    ${slow && !slow.read_verdict && !slow.write_verdict && html`<p class="quiet-text">Nothing was asked of it in the last two minutes.</p>`}
    ${slow && html`<${Kind} name="Reads" kind=${slow.reads} verdict=${slow.read_verdict} />`}
    ${slow && html`<${Kind} name="Writes" kind=${slow.writes} verdict=${slow.write_verdict} />`}
    <${Command} text=${`holdfast why slow ${quoted(name)}`} />
  </section>`;
}

function Snapshots({ volume, act, isAdmin }) {
  const { health } = useStore();
  const [told, trouble] = useLook(path("volumes", volume.name, "snapshots"), health.clock_ms);
  const snapshots = told?.snapshots ?? [];
  const tool = (title, of) => html`<button type="button" onClick=${() => act(of)}>${title}</button>`;
  const own = ({ shares }) => (shares ? `, ${bytes(shares.exclusive_bytes)} of its own` : "");
  return html`<section aria-labelledby="snapshots">
    <header class="bar-of-tools">
      <h2 id="snapshots">Snapshots</h2>
      ${isAdmin && tool("Take a snapshot", actions.snapshot(volume))}
    </header>
    ${trouble && html`<p class="quiet-text">${trouble}</p>`}
    ${volume.schedule &&
    html`<p class="quiet-text">One is taken every ${volume.schedule.every}; kept are ${volume.schedule.keep}.</p>`}
    ${told && snapshots.length === 0 && html`<p class="quiet-text">There are none.</p>`}
    <ul class="tasks">
      ${[...snapshots].reverse().map(
        (snapshot) =>
          html`<li key=${snapshot.name}>
            <span>${snapshot.name}</span>
            <span class="quiet-text">
              ${new Date(snapshot.created_ms).toLocaleString()}${own(snapshot)}
            </span>
            ${isAdmin &&
            html`<span class="tools">
              ${tool("Clone", actions.clone(volume, snapshot))} ${tool("Roll back", actions.rollback(volume, snapshot))}
              ${tool("Delete", actions.deleteSnapshot(volume, snapshot))}
            </span>`}
          </li>`,
      )}
    </ul>
  </section>`;
}

export function Volume({ name, act }) {
  const { health, role, machines } = useStore();
  const found = health.volumes.find((volume) => volume.name === name);
  const volume = found && whole(found);
  if (!volume) {
    return html`<section><h2>${name}</h2>
      <p>There is no such volume (any more). <a href="#/volumes">All volumes</a></p></section>`;
  }
  const isAdmin = role === "admin";
  const hosts = machines.filter((machine) => machine.up && machine.name !== volume.host).map((machine) => machine.name);
  const tool = (title, of) => html`<button type="button" onClick=${() => act(of)}>${title}</button>`;
  return html`<section aria-labelledby="volume">
      <header class="bar-of-tools">
        <h2 id="volume">${name}</h2>
        ${isAdmin &&
        html`<span class="tools">
          ${tool("Resize", actions.resize(volume))} ${tool("Limits", actions.limits(volume))}
          ${hosts.length > 0 && tool("Hand over", actions.handover(volume, hosts))}
          ${volume.exported ? tool("Out of service", actions.unexport(volume)) : tool("Into service", actions.export(volume))}
          ${tool("Delete", actions.delete(volume))}
        </span>`}
      </header>
      <${Facts} volume=${volume} />
    </section>
    <${Snapshots} volume=${volume} act=${act} isAdmin=${isAdmin} />
    <${Slow} name=${name} />`;
}
