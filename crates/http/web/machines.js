// Machines, their nodes and devices.

import { html } from "/web/vendor/preact.js";
import { actions } from "./actions.js";
import { Badge, Bar, useStore } from "./parts.js";
import { bytes, percent, time } from "./words.js";

/** How a device does, in a word: of what its node says of it. */
function stateOf(device, node) {
  if (["down", "hung", "cut"].includes(node.state)) return { word: "out of reach", tone: "critical" };
  if (device.health === "failed") return { word: device.outage ? "failed" : "missing", tone: "critical" };
  if (device.draining) return { word: device.left ? `emptied, ${device.left} left` : "empty", tone: "warning" };
  if (device.slow_s !== undefined) return { word: "slow", tone: "warning" };
  if (device.errors_within_s !== undefined) return { word: "errors", tone: "warning" };
  return { word: device.health };
}

function placeOf(device, node) {
  const place = (node.configured ?? []).findIndex((known) => known.device === device.device);
  return place < 0 ? device.device.slice(0, 8) : `${node.id}/${place}`;
}

function Device({ device, node, act, isAdmin }) {
  const { word, tone } = stateOf(device, node);
  const used = device.capacity_bytes - device.free_bytes;
  const place = placeOf(device, node);
  const p99 = Math.max(device.read_p99_us ?? 0, device.write_p99_us ?? 0);
  const text = `${bytes(used)} of ${bytes(device.capacity_bytes)}`;
  const parts = [{ name: "in use", size: used, tone: "data" }];
  const path = (node.configured ?? []).find((known) => known.device === device.device)?.path;
  const tool = (title, of) => html`<button type="button" onClick=${() => act(of)}>${title}</button>`;
  return html`<tr>
    <th scope="row" title=${path ?? device.device}>${place}</th>
    <td><${Badge} word=${word} tone=${tone} /></td>
    <td>${device.class ?? ""}</td>
    <td class="wide">
      <${Bar} parts=${parts} whole=${device.capacity_bytes || 1} label=${`${place}: ${text}`} />
    </td>
    <td class="number">${percent(used, device.capacity_bytes).toFixed(0)} %</td>
    <td class="number">${bytes(device.capacity_bytes)}</td>
    <td class="number">${p99 ? time(p99) : "–"}</td>
    <td class="number">${device.io_errors || "–"}</td>
    <td>
      <div class="tools">
        ${isAdmin && !device.draining && tool("Replace", actions.replace(device, place, path))}
        ${isAdmin && device.draining && tool("Keep", actions.cancelDrain(device, place))}
        ${isAdmin && device.draining && !device.left && device.shards === 0 && tool("Take out", actions.remove(device, place))}
      </div>
    </td>
  </tr>`;
}

function Node({ node, act, isAdmin }) {
  return html`<div class="node">
    <h3>
      Node ${node.id} <${Badge} word=${node.state} />
      <span class="quiet-text">${node.address}${node.trouble ? `: ${node.trouble}` : ""}</span>
    </h3>
    <div class="table" tabindex="0">
      <table class="plain" aria-label=${`Devices of node ${node.id}`}>
        <thead>
          <tr>
            <th scope="col">device</th>
            <th scope="col">state</th>
            <th scope="col">class</th>
            <th scope="col">in use</th>
            <th scope="col" class="number">share</th>
            <th scope="col" class="number">capacity</th>
            <th scope="col" class="number">slowest of 100</th>
            <th scope="col" class="number">errors</th>
            <th scope="col">do</th>
          </tr>
        </thead>
        <tbody>
          ${node.devices.map(
            (device) =>
              html`<${Device} key=${device.device} device=${device} node=${node} act=${act} isAdmin=${isAdmin} />`,
          )}
        </tbody>
      </table>
    </div>
  </div>`;
}

export function Machines({ act }) {
  const { health, machines, role } = useStore();
  const names = [...new Set(health.nodes.map((node) => node.machine ?? ""))];
  const all = [...new Set([...machines.map((machine) => machine.name), ...names])].sort();
  return all.map((name) => {
    const machine = machines.find((machine) => machine.name === name);
    const nodes = health.nodes.filter((node) => (node.machine ?? "") === name);
    return html`<section key=${name} aria-label=${name ? `Machine ${name}` : "Nodes"}>
      <h2>
        ${name ? `Machine ${name}` : "Nodes"} ${machine && html`<${Badge} word=${machine.up ? "up" : "down"} />`}
        <span class="quiet-text">
          ${[machine?.address, machine?.release && `release ${machine.release}`, machine?.signs && "signs certificates"]
            .filter(Boolean)
            .join(", ")}
        </span>
      </h2>
      ${nodes.map((node) => html`<${Node} key=${node.id} node=${node} act=${act} isAdmin=${role === "admin"} />`)}
    </section>`;
  });
}
