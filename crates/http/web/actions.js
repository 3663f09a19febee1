// What can be done, each with the command that does the same.

import { html, useState } from "/web/vendor/preact.js";
import { ask, path } from "./ask.js";
import { Command, Dialog } from "./parts.js";
import { afterChange, state } from "./store.js";
import { bytes, bytesOf, quoted, sizeWord } from "./words.js";

const sizeIn = (values) => sizeWord(bytesOf(values.size) || 0);
const whole = { check: (text) => Number.isFinite(bytesOf(text)) && bytesOf(text) > 0, why: "a size, such as 10 GiB" };
const devicePath = { check: (text) => text.trim() === "" || text.trim().startsWith("/"), why: "a path that begins with /" };
const filled = (why) => ({ check: (text) => text.trim() !== "", why });
const name = { check: (text) => /^[\w][\w.-]*$/.test(text), why: "letters, digits, `.`, `_` and `-`" };

/** The layouts that there is room for, by what they bear. */
function layouts() {
  const writable = state.capacity?.writable ?? [];
  return writable.map((of) => ({
    value: of.layout,
    text: `${of.layout}: bears the loss of ${of.bears}; ${bytes(of.bytes)} can be written`,
  }));
}

/**
 * Each has a title, fields, and of what these are filled with: a command and a request. `warning` stands above them.
 */
export const actions = {
  create: () => ({
    title: "New volume",
    button: "Make it",
    fields: [
      { key: "name", label: "Name", rule: name },
      { key: "size", label: "Size", value: "10 GiB", rule: whole },
      { key: "layout", label: "Layout", value: state.room?.layout ?? "", options: layouts() },
      {
        key: "compress",
        label: "Compression",
        value: "off",
        options: ["off", "lz4", "auto"].map((value) => ({ value, text: value })),
      },
    ],
    command: (values) =>
      `holdfast volume create ${quoted(values.name || "NAME")} --size ${sizeIn(values)} --layout ${values.layout}` +
      (values.compress === "off" ? "" : ` --compress ${values.compress}`),
    request: (values) => [
      "POST",
      path("volumes"),
      { name: values.name, size_bytes: bytesOf(values.size), layout: values.layout, compression: values.compress },
    ],
    then: (values) => `#/volume/${encodeURIComponent(values.name)}`,
  }),
  resize: (volume) => ({
    title: `Resize ${volume.name}`,
    button: "Resize",
    about: "Clients see the new size when they connect anew. To make a volume smaller takes the command line.",
    fields: [{ key: "size", label: "Size", value: bytes(volume.size_bytes), rule: whole }],
    command: (values) => `holdfast volume resize ${quoted(volume.name)} --size ${sizeIn(values)}`,
    request: (values) => ["POST", path("volumes", volume.name, "resize"), { size_bytes: bytesOf(values.size) }],
  }),
  limits: (volume) => ({
    title: `Limits of ${volume.name}`,
    button: "Set",
    about: "As weight=400,limit=500/50MiB,burst=2s,latency=2ms,floor=300; any of them, or none.",
    fields: [{ key: "qos", label: "Policy", value: volume.limit ?? "none", rule: filled("a policy, or none") }],
    command: (values) => `holdfast volume set ${quoted(volume.name)} --qos ${quoted(values.qos.trim())}`,
    request: (values) => ["PATCH", path("volumes", volume.name), { qos: values.qos.trim() }],
  }),
  handover: (volume, hosts) => ({
    title: `Hand ${volume.name} over`,
    button: "Hand over",
    about: `Another host serves it then; clients of ${volume.host ?? "this host"} go on through it.`,
    fields: [{ key: "to", label: "To", value: hosts[0], options: hosts.map((value) => ({ value, text: value })) }],
    command: (values) => `holdfast volume handover ${quoted(volume.name)} --to ${quoted(values.to)}`,
    request: (values) => ["POST", path("volumes", volume.name, "handover"), { to: values.to }],
  }),
  export: (volume) => ({
    title: `Put ${volume.name} into service`,
    button: "Into service",
    fields: [],
    command: () => `holdfast volume export ${quoted(volume.name)}`,
    request: () => ["POST", path("volumes", volume.name, "export"), {}],
  }),
  unexport: (volume) => ({
    title: `Take ${volume.name} out of service`,
    button: "Out of service",
    about: "Its data stays. It is refused while clients are connected.",
    fields: [],
    command: () => `holdfast volume unexport ${quoted(volume.name)}`,
    request: () => ["DELETE", path("volumes", volume.name, "export")],
  }),
  delete: (volume) => ({
    title: `Delete ${volume.name}`,
    button: "Delete",
    isHarm: true,
    about: volume.clone_of ? "A clone is deleted for good." : "It goes into the trash, for a day.",
    fields: [
      {
        key: "again",
        label: "Its name, once more",
        rule: { check: (text) => text === volume.name, why: `exactly ${volume.name}` },
      },
    ],
    command: () => `holdfast volume delete ${quoted(volume.name)}`,
    request: () => ["DELETE", path("volumes", volume.name)],
    then: () => "#/volumes",
  }),
  restore: (trash) => ({
    title: `Restore ${trash.name}`,
    button: "Restore",
    fields: [{ key: "name", label: "Under the name", value: trash.name, rule: name }],
    command: (values) => `holdfast volume trash restore ${quoted(trash.id)} --name ${quoted(values.name)}`,
    request: (values) => ["POST", path("trash", trash.id, "restore"), { name: values.name }],
  }),
  snapshot: (volume) => ({
    title: `Take a snapshot of ${volume.name}`,
    button: "Take it",
    fields: [{ key: "name", label: "Name", value: `s-${new Date().toISOString().slice(0, 10)}`, rule: name }],
    command: (values) => `holdfast snapshot create ${quoted(volume.name)} ${quoted(values.name)}`,
    request: (values) => ["POST", path("volumes", volume.name, "snapshots"), { name: values.name }],
  }),
  clone: (volume, snapshot) => ({
    title: `Clone ${volume.name}@${snapshot.name}`,
    button: "Clone",
    fields: [
      { key: "name", label: "Name of the clone", rule: name },
      {
        key: "separate",
        label: "As",
        value: "part",
        options: [
          { value: "part", text: "a part of this volume" },
          { value: "separate", text: "a volume of its own, which any host can serve" },
        ],
      },
    ],
    command: (values) =>
      `holdfast volume clone ${quoted(`${volume.name}@${snapshot.name}`)} ${quoted(values.name || "NAME")}` +
      (values.separate === "separate" ? " --separate" : ""),
    request: (values) => [
      "POST",
      path("volumes", volume.name, "snapshots", snapshot.name, "clone"),
      { name: values.name, separate: values.separate === "separate" },
    ],
    then: (values) => `#/volume/${encodeURIComponent(values.name)}`,
  }),
  rollback: (volume, snapshot) => ({
    title: `Roll ${volume.name} back to ${snapshot.name}`,
    button: "Roll back",
    isHarm: true,
    about: "What was written since is gone. It is refused while clients are connected.",
    fields: [],
    command: () => `holdfast snapshot rollback ${quoted(volume.name)} ${quoted(snapshot.name)}`,
    request: () => ["POST", path("volumes", volume.name, "snapshots", snapshot.name, "rollback")],
  }),
  deleteSnapshot: (volume, snapshot) => ({
    title: `Delete the snapshot ${snapshot.name} of ${volume.name}`,
    button: "Delete",
    isHarm: true,
    fields: [],
    command: () => `holdfast snapshot delete ${quoted(volume.name)} ${quoted(snapshot.name)}`,
    request: () => ["DELETE", path("volumes", volume.name, "snapshots", snapshot.name)],
  }),
  replace: (device, place, file) => ({
    title: `Replace device ${place}`,
    button: "Replace",
    isHarm: true,
    about: `The new one is taken in and everything is moved off ${file ?? place}, while it is used; then it can be taken out.`,
    fields: [{ key: "path", label: "The new device, a path at its machine; nothing for a new file", rule: devicePath }],
    command: (values) => `holdfast device replace ${place}${values.path ? ` ${quoted(values.path)}` : ""} --no-wait`,
    request: (values) => [
      "POST",
      path("devices", device.device, "replace"),
      values.path ? { path: values.path.trim() } : {},
    ],
  }),
  remove: (device, place) => ({
    title: `Take device ${place} out`,
    button: "Take it out",
    isHarm: true,
    about: "It is empty. Its file in the grid's directory is deleted; another device can be taken again.",
    fields: [],
    command: () => `holdfast device remove ${place}`,
    request: () => ["DELETE", path("devices", device.device)],
  }),
  cancelDrain: (device, place) => ({
    title: `Keep device ${place}`,
    button: "Keep it",
    about: "It takes data again.",
    fields: [],
    command: () => `holdfast device drain ${place} --cancel`,
    request: () => ["POST", path("devices", device.device, "drain"), { cancel: true }],
  }),
};

function Field({ field, value, isShown, onInput }) {
  const id = `field-${field.key}`;
  const input = (event) => onInput(event.target.value);
  const isWrong = field.rule && !field.rule.check(value);
  return html`<div class="field">
    <label for=${id}>${field.label}</label>
    ${field.options
      ? html`<select id=${id} value=${value} onChange=${input}>
          ${field.options.map((of) => html`<option value=${of.value} selected=${of.value === value}>${of.text}</option>`)}
        </select>`
      : html`<input
          id=${id}
          value=${value}
          onInput=${input}
          autocomplete="off"
          spellcheck=${false}
          aria-invalid=${isShown && isWrong ? "true" : "false"}
          aria-describedby=${`${id}-why`}
        />`}
    <p class="why" id=${`${id}-why`}>${isShown && isWrong ? `This has to be ${field.rule.why}.` : ""}</p>
  </div>`;
}

/** Asks, does it, and says what became of it. */
export function Action({ action, onClose }) {
  const [values, setValues] = useState(Object.fromEntries(action.fields.map((field) => [field.key, field.value ?? ""])));
  const [isTried, setTried] = useState(false);
  const [isUnderWay, setUnderWay] = useState(false);
  const [trouble, setTrouble] = useState(null);
  const isRight = action.fields.every((field) => !field.rule || field.rule.check(values[field.key]));
  const submit = async (event) => {
    event.preventDefault();
    setTried(true);
    if (!isRight || isUnderWay) return;
    setUnderWay(true);
    setTrouble(null);
    try {
      await ask(...action.request(values));
      await afterChange();
      onClose();
      if (action.then) location.hash = action.then(values);
    } catch (error) {
      setTrouble(error.message);
      setUnderWay(false);
    }
  };
  return html`<${Dialog} title=${action.title} onClose=${onClose}>
    <form onSubmit=${submit} novalidate>
      ${action.about && html`<p>${action.about}</p>`}
      ${action.fields.map(
        (field) =>
          html`<${Field}
            key=${field.key}
            field=${field}
            value=${values[field.key]}
            isShown=${isTried}
            onInput=${(value) => setValues({ ...values, [field.key]: value })}
          />`,
      )}
      <p class="label">The same as a command</p>
      <${Command} text=${action.command(values)} />
      ${trouble && html`<p class="trouble" role="alert">${trouble}</p>`}
      <div class="buttons">
        <button type="submit" class=${action.isHarm ? "harm" : "main"} disabled=${isUnderWay}>
          ${isUnderWay ? "Under way …" : action.button}
        </button>
        <button type="button" onClick=${onClose}>Cancel</button>
      </div>
    </form>
  <//>`;
}
