// The first page: whether all is well, how much there is, what goes on.

import { html } from "/web/vendor/preact.js";
import { Chart } from "./chart.js";
import { Badge, Command, useStore } from "./parts.js";
import { Space } from "./space.js";
import { bytes, count, plural, span } from "./words.js";

/** A finding's next step: words, with commands in them between backticks. */
function Next({ next }) {
  const parts = (next ?? "").split("`");
  const isCommand = (_, index) => index % 2 === 1;
  const words = parts.map((part, index) => (isCommand(part, index) ? html`<code>${part}</code>` : part));
  const isAlone = parts.length === 3 && parts[0] + parts[2] === "";
  return html`${next && !isAlone && html`<p>${words}</p>`}
  ${parts.filter(isCommand).map((part) => html`<${Command} key=${part} text=${part} />`)}`;
}

function Findings({ findings }) {
  if (findings.length === 0) return html`<p class="quiet-text">Nothing needs anybody.</p>`;
  return html`<ul class="findings">
    ${findings.map((finding) => {
      const word = finding.announced ? "announced" : finding.severity;
      return html`<li key=${finding.concern + finding.about} class=${word}>
        <p><${Badge} word=${word} /> <strong>${finding.concern.replaceAll("-", " ")}</strong>: ${finding.what}</p>
        <${Next} next=${finding.next} />
      </li>`;
    })}
  </ul>`;
}

function leftOf(task) {
  const parts = [`${count(task.left)} ${task.unit} left`];
  if (task.per_second > 0) parts.push(`${count(task.per_second)} a second`);
  if (task.seconds_left !== undefined) parts.push(`${span(task.seconds_left)} to go`);
  return parts.join(", ");
}

function Tasks({ tasks }) {
  if (!tasks) return html`<p class="quiet-text">Hosts have not said what they do.</p>`;
  const silent = tasks.silent.length > 0 && html`<p>No word from ${tasks.silent.join(", ")}.</p>`;
  if (tasks.tasks.length === 0) return html`${silent}<p class="quiet-text">Nothing is done in the background.</p>`;
  return html`${silent}
    <ul class="tasks">
      ${tasks.tasks.map(
        (task) =>
          html`<li key=${task.name}>
            <span>${task.name}</span>
            <span class="quiet-text">${leftOf(task)}</span>
          </li>`,
      )}
    </ul>`;
}

function Events({ events }) {
  if (events.length === 0) {
    return html`<p class="quiet-text">Nothing has changed since this page was opened.</p>`;
  }
  return html`<ol class="events" aria-live="polite">
    ${events.map(
      ({ at, kind, finding }) =>
        html`<li key=${at + finding.about + kind}>
          <time>${new Date(at).toLocaleTimeString()}</time>
          <${Badge} word=${kind === "cleared" ? "cleared" : finding.severity} />
          <span>${finding.what}</span>
        </li>`,
    )}
  </ol>`;
}

function Figures({ health, rates }) {
  const served = health.volumes.filter((volume) => !volume.clone_of);
  const sum = (key) => [...rates.values()].reduce((all, rate) => all + rate[key], 0);
  const up = health.nodes.filter((node) => ["up", "suspect"].includes(node.state)).length;
  const figures = [
    ["nodes up", `${up} of ${health.nodes.length}`],
    ["volumes", `${served.length}`],
    ["requests", `${count(sum("reads") + sum("writes"))}/s`],
    ["read", `${bytes(sum("readBytes"))}/s`],
    ["written", `${bytes(sum("writeBytes"))}/s`],
  ];
  return html`<dl class="figures">${figures.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

export function Overview() {
  const { health, tasks, capacity, events, rates, history } = useStore();
  const line = (name, key) => ({ name, values: history[key] });
  return html`<${Figures} health=${health} rates=${rates} />
    <section aria-labelledby="findings">
      <h2 id="findings">${health.findings.length ? plural(health.findings.length, "finding") : "All is well"}</h2>
      <${Findings} findings=${health.findings} />
    </section>
    <section aria-labelledby="load">
      <h2 id="load">Load of this host</h2>
      <div class="charts">
        <${Chart}
          title="Requests a second"
          at=${history.at}
          format=${count}
          lines=${[line("reads", "reads"), line("writes", "writes")]}
        />
        <${Chart}
          title="Bytes a second"
          at=${history.at}
          format=${bytes}
          lines=${[line("read", "readBytes"), line("written", "writeBytes")]}
        />
        <${Chart}
          title="Slowest in a hundred, ms, of the last minute"
          at=${history.at}
          format=${(ms) => `${ms.toFixed(1)} ms`}
          lines=${[line("reads", "readP99"), line("writes", "writeP99")]}
        />
      </div>
    </section>
    <section aria-labelledby="space">
      <h2 id="space">Space</h2>
      <${Space} capacity=${capacity} />
    </section>
    <section aria-labelledby="tasks">
      <h2 id="tasks">In the background</h2>
      <${Tasks} tasks=${tasks} />
    </section>
    <section aria-labelledby="events">
      <h2 id="events">Events</h2>
      <${Events} events=${events} />
    </section>`;
}
