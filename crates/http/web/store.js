// What the page knows of the grid, and how it hears of it.

import { ask, listen, path } from "./ask.js";

const LOOK_MS = 2000;
const SELDOM_MS = 10000;
const AGAIN_MS = 2000;
const KEPT_LOOKS = 450;
const KEPT_EVENTS = 200;

/** What volumes at other hosts did, by when those told of it. */
let toldBefore = null;

const listeners = new Set();

/** Replaced as a whole by `set`. */
export let state = {
  role: null,
  isLockedOut: false,
  trouble: null,
  health: null,
  tasks: null,
  capacity: null,
  machines: [],
  room: null,
  elsewhere: new Map(),
  events: [],
  rates: new Map(),
  history: { at: [], reads: [], writes: [], readBytes: [], writeBytes: [], readP99: [], writeP99: [] },
};

export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

function set(change) {
  state = { ...state, ...change };
  listeners.forEach((listener) => listener());
}

/** Requests a second of each volume, by what was counted since the look before. */
function ratesOf(before, now) {
  const rates = new Map();
  if (!before) return rates;
  const seconds = (now.clock_ms - before.clock_ms) / 1000;
  const known = new Map(before.volumes.map((volume) => [volume.id, volume]));
  for (const volume of now.volumes) {
    const [then, live] = [known.get(volume.id)?.live, volume.live];
    if (!then || !live || seconds <= 0 || volume.epoch !== known.get(volume.id).epoch) continue;
    const of = (key) => Math.max(0, live.counters[key] - then.counters[key]) / seconds;
    rates.set(volume.name, {
      reads: of("reads"),
      writes: of("writes"),
      readBytes: of("read_bytes"),
      writeBytes: of("write_bytes"),
    });
  }
  return rates;
}

/** The sums of all volumes in service here, with the worst of their percentiles. */
function longer(history, health, rates) {
  const own = health.volumes.filter((volume) => volume.live && !volume.clone_of);
  const sum = (key) => own.reduce((all, volume) => all + (rates.get(volume.name)?.[key] ?? 0), 0);
  const worst = (key) => Math.max(0, ...own.map((volume) => volume.live[key]?.p99_us ?? 0)) / 1000;
  const next = {
    at: health.clock_ms / 1000,
    reads: sum("reads"),
    writes: sum("writes"),
    readBytes: sum("readBytes"),
    writeBytes: sum("writeBytes"),
    readP99: worst("read_times"),
    writeP99: worst("write_times"),
  };
  return Object.fromEntries(Object.entries(history).map(([key, all]) => [key, [...all, next[key]].slice(-KEPT_LOOKS)]));
}

let underWay = null;

/** Looks at the grid; looks that are asked for meanwhile are this one. */
export function look() {
  underWay ??= lookNow().finally(() => (underWay = null));
  return underWay;
}

async function lookNow() {
  try {
    const health = await ask("GET", path("health"));
    const rates = ratesOf(state.health, health);
    const history = state.health ? longer(state.history, health, rates) : state.history;
    set({ health, rates, history, trouble: null, isLockedOut: false });
  } catch (error) {
    fail(error);
  }
}

let seldomUnderWay = null;

function lookSeldom() {
  seldomUnderWay ??= lookSeldomNow().finally(() => (seldomUnderWay = null));
  return seldomUnderWay;
}

/** One after the other: each answer takes memory of the host while it is made. */
async function lookSeldomNow() {
  const told = {};
  for (const of of ["tasks", "machines", "room", "capacity"]) told[of] = await ask("GET", path(of)).catch(() => null);
  const { tasks, machines, room, capacity } = told;
  set({ tasks, capacity, machines: machines?.machines ?? state.machines, room, elsewhere: elsewhereOf(capacity) });
}

/** Volumes that other hosts have in service: how they do, with rates since those hosts told of them before. */
function elsewhereOf(capacity) {
  const told = new Map((capacity?.volumes ?? []).filter((of) => of.work).map((of) => [of.name, of]));
  const now = performance.now() / 1000;
  const found = new Map();
  for (const [name, { work, space }] of told) {
    const then = toldBefore?.told.get(name)?.work;
    const rate = (key) => (then && work[key] >= then[key] ? (work[key] - then[key]) / (now - toldBefore.at) : null);
    const [reads, writes] = [rate("reads"), rate("writes")];
    const rates = reads === null || writes === null ? null : { reads, writes };
    found.set(name, { live: { ...work, space }, rates });
  }
  toldBefore = { told, at: now };
  return found;
}

/** A volume as the host tells of it that has it in service, as far as any has told. */
export function whole(volume) {
  const live = volume.live ?? (volume.clone_of ? undefined : state.elsewhere.get(volume.name)?.live);
  return { ...volume, live };
}

export function ratesFor(volume) {
  return state.rates.get(volume.name) ?? state.elsewhere.get(volume.name)?.rates ?? null;
}

function fail(error) {
  if (error.status === 401) set({ isLockedOut: true, trouble: error.message });
  else set({ trouble: error.message });
}

function heard(kind, told) {
  if (kind === "raised" || kind === "cleared") {
    const events = [{ at: Date.now(), kind, finding: told }, ...state.events].slice(0, KEPT_EVENTS);
    set({ events });
    look();
  }
}

async function listenOn() {
  for (;;) {
    if (!state.isLockedOut) {
      await listen(heard).catch(() => {});
    }
    await new Promise((then) => setTimeout(then, AGAIN_MS));
  }
}

/** Begins to look, or begins anew with another token. */
export async function enter() {
  try {
    const { role } = await ask("GET", path("access"));
    set({ role, isLockedOut: false, trouble: null });
  } catch (error) {
    fail(error);
    return;
  }
  await Promise.all([look(), lookSeldom()]);
}

/** What was changed shows at once. */
export function afterChange() {
  return Promise.all([look(), lookSeldom()]);
}

export function begin() {
  const isSeen = () => document.visibilityState === "visible" && !state.isLockedOut;
  setInterval(() => isSeen() && look(), LOOK_MS);
  setInterval(() => isSeen() && lookSeldom(), SELDOM_MS);
  document.addEventListener("visibilitychange", () => isSeen() && look());
  listenOn();
  return enter();
}
