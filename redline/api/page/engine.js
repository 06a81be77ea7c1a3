// The engine view: a stream of events, one per second, as numbers, charts and tables.

import { Chart, number } from "./charts.js";
import { events } from "./server.js";

const $ = (id) => document.getElementById(id);
const SHOWN_S = 300; // time range of the charts
const WINDOW_S = 3; // time over which a rate is computed
const AGAIN_MS = 2000;
const KINDS = { decode: "decode only", prompts: "with prefill" };
const PAIRED = ["steps", "seconds", "floor_s"];

const samples = []; // {at, now, sums}
const timed = new Map(); // worker and kind of step -> sums of the last event, and the step times shown last
let watching = null;

const CHARTS = [
  [{ title: "Tokens", unit: "per second", lines: ["prefill", "decode"], least: 10 },
    (one) => [rate(one, "computed"), rate(one, "generated")]],
  [{ title: "Decode-only steps", unit: "ms", lines: ["step", "floor"], digits: 1 }, (one) => stepTimes(one, "decode")],
  [{ title: "Steps with prefill", unit: "ms", lines: ["step", "floor"], digits: 1 }, (one) => stepTimes(one, "prompts")],
  [{ title: "Draft tokens accepted", unit: "%", lines: ["accepted"], most: 100 }, (one) => [accepted(one)]],
  [{ title: "KV pages", lines: ["running requests", "prefix cache"] }, ({ sums }) => [sums.used, sums.cached]],
  [{ title: "Queue", unit: "requests", lines: ["waiting", "running"], least: 5 }, ({ now }) => [now.queue.jobs, now.running]],
].map(([what, values]) => ({ chart: new Chart(what, SHOWN_S), values, title: what.title }));
$("charts").append(...CHARTS.map(({ chart }) => chart.figure));

/** Follows the engine while the page is visible; restarts if it is already being followed. */
export async function watch() {
  watching?.abort();
  if (document.hidden) return;
  const control = (watching = new AbortController());
  while (!control.signal.aborted) {
    try {
      for await (const now of events("engine", { signal: control.signal })) take(now);
      $("engine-status").textContent = "The server has ended the stream; reconnecting.";
    } catch (error) {
      if (control.signal.aborted) return;
      $("engine-status").textContent = error.message;
    }
    await new Promise((done) => setTimeout(done, AGAIN_MS));
  }
}
document.addEventListener("visibilitychange", watch);

/** The highest token rate of the engine in any second of the last `seconds`; null if there are too few samples. */
export function ownRate(seconds) {
  const seen = samples.filter(({ at }) => at >= samples.at(-1).at - seconds);
  const rates = seen.slice(1).map(({ at, sums }, place) => (sums.generated - seen[place].sums.generated) / (at - seen[place].at));
  const most = Math.max(...rates);
  return rates.length >= 3 && most > 0 ? most : null;
}

function take(now) {
  const loads = now.workers.map((one) => one.load).filter(Boolean);
  const sum = (name) => loads.reduce((all, load) => all + (load[name] ?? 0), 0);
  const kinds = loads.flatMap((load) => load.step_times ?? []);
  const sums = {
    computed: sum("prompt_tokens") - sum("prompt_tokens_cached"), generated: sum("generation_tokens"),
    drafts: sum("draft_tokens"), accepted: sum("accepted_tokens"),
    used: sum("pages_used"), cached: sum("pages_cached"), pages: sum("pages_total"),
    ...Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, PAIRED.map((name) =>
      kinds.filter((one) => one.kind === kind).reduce((all, one) => all + one[name], 0))])),
  };
  if (now.at <= (samples.at(-1)?.at ?? 0)) samples.length = 0; // another server, or its clock was set
  samples.push({ at: now.at, now, sums });
  while (now.at - samples[0].at > SHOWN_S) samples.shift();
  const steps = now.workers.flatMap(stepRows); // counts from event to event, also while the view is hidden
  if (!$("engine").hidden) show(now, loads, steps);
}

/** Shows the latest data; called for each event too. */
export function showEngine() {
  const now = samples.at(-1)?.now;
  if (now) show(now, now.workers.map((one) => one.load).filter(Boolean), now.workers.flatMap(stepRows));
}

// ---------------------------------------------------------------------------------------------------- over time

function before(sample) {
  const place = samples.indexOf(sample);
  for (let at = place - 1; at >= 0; at -= 1) if (sample.at - samples[at].at >= WINDOW_S - 0.5) return samples[at];
  return place > 0 ? samples[0] : null;
}

function rate(sample, name) {
  const then = before(sample);
  return then && Math.max(0, (sample.sums[name] - then.sums[name]) / (sample.at - then.at));
}

function stepTimes(sample, kind) {
  const then = before(sample);
  if (!then) return [null, null];
  const [steps, seconds, floor] = sample.sums[kind].map((value, place) => value - then.sums[kind][place]);
  return steps > 0 ? [(1000 * seconds) / steps, (1000 * floor) / steps] : [null, null];
}

function accepted(sample) {
  const then = before(sample);
  const drafts = then ? sample.sums.drafts - then.sums.drafts : 0;
  return drafts > 0 ? Math.max(0, (100 * (sample.sums.accepted - then.sums.accepted)) / drafts) : null;
}

// ---------------------------------------------------------------------------------------------------- now

function element(name, text = "", how = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  return Object.assign(made, how);
}

function show(now, loads, steps) {
  const last = samples.at(-1);
  const share = (part, whole) => (whole ? `${number((100 * part) / whole)} %` : "–");
  const sum = (name) => total(loads, name);
  $("engine-status").textContent = now.trouble ?? (now.ready ? "Ready." : "Not ready.");
  const numbers = {
    "Tokens/s": number(rate(last, "generated") ?? 0),
    "Running requests": number(now.running),
    "Waiting requests": number(now.queue.jobs),
    "Waiting prompt tokens": number(now.queue.tokens),
    "Prefix cache hits": share(sum("prompt_tokens_cached"), sum("prompt_tokens")),
    "Draft tokens accepted": share(sum("accepted_tokens"), sum("draft_tokens")),
    "KV pages in use": `${number(last.sums.used)} of ${number(last.sums.pages)}`,
  };
  const images = sum("images_encoded");
  if (images) numbers["Images encoded"] = `${number(images)}, ${number((1000 * sum("encode_s")) / images)} ms each`;
  $("engine-numbers").replaceChildren(
    ...Object.entries(numbers).map(([name, value]) => {
      const box = element("div");
      box.append(element("dt", name), element("dd", value));
      return box;
    }),
  );
  for (const { chart, values, title } of CHARTS) {
    const points = samples.map((one) => [one.at, ...(one.values ??= new Map()).get(title) ?? kept(one, title, values)]);
    chart.draw(points, title === "KV pages" ? last.sums.pages || 1 : undefined);
  }
  meters("steps", steps);
  meters("positions", loads.some((load) => load.accepted_per_pos?.length) ? positions(loads) : []);
  meters("proposers", proposers(loads));
  meters("holders", now.workers.flatMap(holders));
  workers(now.workers);
}

function kept(sample, title, values) {
  const found = values(sample);
  sample.values.set(title, found);
  return found;
}

// Rows of a table: name, part, whole, and a text, by default the counts.
function meters(id, rows) {
  $(id).hidden = !rows.length;
  $(id).querySelector("tbody").replaceChildren(
    ...rows.map(([name, part, whole, said]) => {
      const line = element("tr");
      const cell = element("td");
      const share = whole ? part / whole : 0;
      const meter = element("meter", `${number(100 * share)} %`, { min: 0, max: 1, value: share });
      meter.setAttribute("aria-label", name);
      cell.append(meter);
      const counts = said ?? `${number(100 * share)} %, ${number(part)} of ${number(whole)}`;
      line.append(element("th", name, { scope: "row" }), cell, element("td", counts));
      return line;
    }),
  );
}

const total = (loads, name) => loads.reduce((sum, load) => sum + (load[name] ?? 0), 0);

function positions(loads) {
  const drafts = total(loads, "drafts");
  const most = Math.max(...loads.map((load) => load.accepted_per_pos.length));
  return Array.from({ length: most }, (_, place) => [
    `draft ${place + 1}`, loads.reduce((sum, load) => sum + (load.accepted_per_pos[place] ?? 0), 0), drafts,
  ]);
}

function proposers(loads) {
  const [made, held] = [total(loads, "draft_tokens"), total(loads, "accepted_tokens")];
  const [suffix, grammar] = ["suffix", "grammar"].map((by) => ["draft", "accepted"].map((what) => total(loads, `${by}_${what}_tokens`)));
  const learned = [made - suffix[0] - grammar[0], held - suffix[1] - grammar[1]];
  const rows = [["drafter", ...learned], ["earlier text", ...suffix], ["grammar", ...grammar]];
  return rows.filter(([, all]) => all).map(([name, all, good]) => [name, good, all]);
}

function holders({ name, load }) {
  if (!load?.pages_total) return [];
  const free = load.pages_total - load.pages_used - load.pages_cached;
  const parts = [["running requests", load.pages_used], ["prefix cache only", load.pages_cached], ["free", free]];
  return parts.map(([who, pages]) => [`${name}: ${who}`, pages, load.pages_total]);
}

// A worker reports sums since its start: the newest steps are the difference to the last event. If there are none, the
// previous values stay.
function newest(key, sums) {
  const known = timed.get(key);
  if (known?.sums === sums) return known.shown;
  const then = known && known.sums.steps <= sums.steps ? known.sums : { steps: 0, seconds: 0, floor_s: 0 };
  const steps = sums.steps - then.steps;
  const shown = steps
    ? { ms: (1000 * (sums.seconds - then.seconds)) / steps, floor: (1000 * (sums.floor_s - then.floor_s)) / steps }
    : known.shown;
  timed.set(key, { sums, shown });
  return shown;
}

function stepRows({ name, load, read_bytes_per_s }) {
  const kinds = (load?.step_times ?? []).filter(({ steps }) => steps).sort((a, b) => a.kind.localeCompare(b.kind));
  return kinds.map((sums) => {
    const { ms, floor } = newest(`${name} ${sums.kind}`, sums);
    const share = `${number((100 * floor) / ms)} %`;
    const said = `step ${number(ms, 1)} ms, floor ${number(floor, 1)} ms, ${share}, at ${number(read_bytes_per_s / 1e9, 1)} GB/s`;
    return [`${name}: ${KINDS[sums.kind] ?? sums.kind}`, floor, ms, said];
  });
}

const COUNTS = ["running", "waiting", "pages_used", "pages_cached", "pages_total", "steps", "replayed", "preemptions", "generation_tokens"];

function workers(all) {
  const row = (name, cells, kind = "td") => {
    const line = element("tr");
    line.append(element("th", name, { scope: "row" }), ...cells.map((cell) => element(kind, cell)));
    return line;
  };
  $("workers").replaceChildren(
    row("", all.map(({ name }) => name), "th"),
    row("role", all.map(({ role }) => role)),
    row("ready", all.map(({ ready }) => (ready ? "yes" : "no"))),
    ...COUNTS.map((name) => row(name.replaceAll("_", " "), all.map(({ load }) => (load ? number(load[name]) : "–")))),
  );
}
