// The page as a whole: who is let in, what is shown, and one line that says whether all is well.

import { html, render, useEffect, useState } from "/web/vendor/preact.js";
import { Action } from "./actions.js";
import { forgetToken, hasToken, setToken, takeToken } from "./ask.js";
import { Machines } from "./machines.js";
import { Overview } from "./overview.js";
import { Dialog, useStore } from "./parts.js";
import { begin, enter } from "./store.js";
import { Volume } from "./volume.js";
import { Volumes } from "./volumes.js";
import { plural } from "./words.js";

const PAGES = [
  { hash: "#/", title: "Overview" },
  { hash: "#/volumes", title: "Volumes" },
  { hash: "#/machines", title: "Machines" },
];

/** Keys that lead to pages, and the one that tells of them. */
const KEYS = { o: "#/", v: "#/volumes", m: "#/machines" };

function useHash() {
  const [hash, setHash] = useState(location.hash || "#/");
  useEffect(() => {
    const changed = () => setHash(location.hash || "#/");
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return hash;
}

function headline({ health, trouble }) {
  if (trouble) return { tone: "critical", text: `No word from the host: ${trouble}` };
  if (!health) return { tone: "plain", text: "The host is asked …" };
  const told = health.findings.filter((finding) => !finding.announced);
  const of = (severity) => told.filter((finding) => finding.severity === severity).length;
  const [critical, warnings] = [of("critical"), of("warning")];
  if (critical > 0) return { tone: "critical", text: `${plural(critical, "thing")} critical: ${told[0].what}` };
  if (warnings > 0) return { tone: "warning", text: `${plural(warnings, "warning")}: ${told[0].what}` };
  return { tone: "good", text: health.findings.length ? "All is well, beside what was announced" : "All is well" };
}

function Login() {
  const { trouble } = useStore();
  const [token, setShown] = useState("");
  const submit = (event) => {
    event.preventDefault();
    setToken(token.trim());
    enter();
  };
  return html`<main class="login">
    <h1>Holdfast</h1>
    <form onSubmit=${submit}>
      <label for="token">Token</label>
      <input id="token" type="password" autocomplete="off" value=${token} onInput=${(event) => setShown(event.target.value)} />
      <button type="submit" class="main" disabled=${token.trim() === ""}>Show the grid</button>
      ${hasToken() && trouble && html`<p class="trouble" role="alert">${trouble}</p>`}
      <p class="quiet-text">
        <code>holdfast grid tls operator NAME --token</code> makes one; with <code>--reader</code> one that may only look. The tab
        keeps it until it is closed.
      </p>
    </form>
  </main>`;
}

function Help({ onClose }) {
  return html`<${Dialog} title="Keys" onClose=${onClose}>
    <dl class="facts">
      <div><dt><kbd>o</kbd></dt><dd>overview</dd></div>
      <div><dt><kbd>v</kbd></dt><dd>volumes</dd></div>
      <div><dt><kbd>m</kbd></dt><dd>machines</dd></div>
      <div><dt><kbd>/</kbd></dt><dd>filter volumes</dd></div>
      <div><dt><kbd>Esc</kbd></dt><dd>close</dd></div>
    </dl>
  <//>`;
}

function Page({ hash, act }) {
  const volume = /^#\/volume\/(.+)$/.exec(hash);
  if (volume) return html`<${Volume} key=${hash} name=${decodeURIComponent(volume[1])} act=${act} />`;
  if (hash === "#/volumes") return html`<${Volumes} act=${act} />`;
  if (hash === "#/machines") return html`<${Machines} act=${act} />`;
  return html`<${Overview} />`;
}

function Shell() {
  const known = useStore();
  const hash = useHash();
  const [action, act] = useState(null);
  const [isHelpShown, showHelp] = useState(false);
  useEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey || event.target.closest("input, select, textarea, dialog")) return;
      if (KEYS[event.key]) location.hash = KEYS[event.key];
      else if (event.key === "?") showHelp(true);
      else if (event.key === "/") {
        event.preventDefault();
        location.hash = "#/volumes";
        setTimeout(() => document.querySelector("input[type=search]")?.focus(), 50);
      }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
  const { tone, text } = headline(known);
  useEffect(() => {
    document.title = `${tone === "good" ? "✓" : tone === "plain" ? "" : "!"} ${known.health?.grid.slice(0, 8) ?? "Holdfast"}`;
  }, [tone, known.health?.grid]);
  if (known.isLockedOut) return html`<${Login} />`;
  const skip = (event) => {
    event.preventDefault();
    document.getElementById("main").focus();
  };
  const leave = () => {
    forgetToken();
    location.reload();
  };
  const isHere = (page) => hash === page.hash || (page.hash === "#/volumes" && hash.startsWith("#/volume/"));
  return html`<a class="skip" href="#main" onClick=${skip}>To the content</a>
    <header class="top">
      <h1>Holdfast</h1>
      <nav aria-label="Pages">
        ${PAGES.map((page) => html`<a href=${page.hash} aria-current=${isHere(page) ? "page" : undefined}>${page.title}</a>`)}
      </nav>
      ${known.role === "reader" && html`<span class="badge plain">you may look</span>`}
      <button type="button" class="quiet" onClick=${() => showHelp(true)} aria-label="Keys">?</button>
      ${hasToken() && html`<button type="button" class="quiet" onClick=${leave}>Leave</button>`}
    </header>
    <div class=${`headline ${tone}`} role="status">${text}</div>
    <main id="main" tabindex="-1">${known.health && html`<${Page} hash=${hash} act=${act} />`}</main>
    ${action && html`<${Action} key=${action.title} action=${action} onClose=${() => act(null)} />`}
    ${isHelpShown && html`<${Help} onClose=${() => showHelp(false)} />`}`;
}

takeToken();
render(html`<${Shell} />`, document.getElementById("app"));
begin();
