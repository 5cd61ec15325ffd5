// The operator's page. The admin key is a variable of this module: it is in no cookie, no storage
// and no URL. Everything that comes from the server is shown as text.

const REFRESH_MS = 60_000;
const NUM_LARGEST = 20;
const TIERS = ["device", "host", "disk"];
const MOVES = { "device,host": "device to host", "host,disk": "host to disk", "disk,host": "disk to host", "host,device": "host to device" };
const SOURCES = ["cold", "device", "host", "disk"];
const MISSES = {
  never_seen: "not stored before",
  expired: "its retention has ended",
  evicted_device: "evicted from VRAM, its last tier",
  evicted_host: "evicted from host memory, its last tier",
  evicted_disk: "evicted from disk, its last tier",
  corrupt: "its copy on disk was damaged",
  admin: "an operator evicted it",
  load_timeout: "loading it took too long",
  load_failed: "loading it failed",
  loads_off: "loading is off",
  computed_sooner: "computing it was faster than loading it",
  behind_lookback: "stored, but the request does not look so far back",
  no_anchor: "stored, but not what the sliding windows of the next token reach",
  template_changed: "the chat template prints another date, or was given other arguments",
  other_namespace: "stored under another salt or cache key",
};

let key = null;
let session = new AbortController(); // ends the questions of a key that is forgotten
let timer = null;
let latest = null; // what the charts show
let ahead_s = 0; // of the server's clock before this one

const byId = (id) => document.getElementById(id);
const sum = (values) => values.reduce((total, each) => total + each, 0);

// Figures for people

const count = (number) => Math.round(number).toLocaleString("en");
const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");

function bytes(size) {
  if (size === null || size === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) [size, unit] = [size / 1024, unit + 1];
  return `${unit ? Number(size.toPrecision(4)) : Math.round(size)} ${units[unit]}`;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Number((1000 * seconds).toPrecision(3))} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const parts = [];
  let left = Math.round(seconds);
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]]) {
    if (left >= size) parts.push(`${Math.floor(left / size)}${unit}`);
    left %= size;
  }
  return parts.slice(0, 2).join(" ");
}

function clock(seconds, precision = {}) {
  return new Date(1000 * seconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", ...precision });
}

const serverTime = () => Date.now() / 1000 + ahead_s;

// Asking the server

async function ask(path, body) {
  const { signal } = session;
  const bytesOfKey = String.fromCharCode(...new TextEncoder().encode(key));
  const headers = key ? { Authorization: `Bearer ${bytesOfKey}` } : {};
  const options = { headers, credentials: "omit", cache: "no-store", redirect: "error", referrerPolicy: "no-referrer", signal };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  const answer = await fetch(path, options).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server does not answer.");
  });
  const told = await answer.json().catch(() => null); // a proxy may answer something else
  signal.throwIfAborted();
  if (answer.ok && told) return told;
  const text = told?.error?.message ?? (answer.ok ? "The answer broke off." : `The server answered ${answer.status}.`);
  if ([401, 403].includes(answer.status)) signOut(text);
  throw new Error(text);
}

function say(text) {
  byId("status").textContent = text;
}

// Tables

function cell(value) {
  const td = document.createElement("td");
  if (value instanceof Node) td.append(value);
  else td.textContent = value ?? "–";
  return td;
}

function fill(id, rows) {
  const table = byId(id);
  const titles = table.tHead.rows[0].cells;
  table.hidden = !rows.length;
  table.tBodies[0].replaceChildren(
    ...rows.map((values) => {
      const row = document.createElement("tr");
      row.append(...values.map(cell));
      [...row.cells].forEach((each, i) => {
        each.setAttribute("data-label", titles[i].textContent);
        each.classList.add(...titles[i].classList);
      });
      return row;
    }),
  );
}

function gauge(share) {
  const meter = document.createElement("meter");
  meter.value = share;
  const whole = document.createElement("span");
  whole.append(meter, ` ${(100 * share).toFixed(0)} %`);
  return whole;
}

// Charts: steps over time, each line with dashes of its own; a gap is where a value is null.

function svg(name, attributes, parent) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [attribute, value] of Object.entries(attributes)) element.setAttribute(attribute, value);
  parent?.append(element);
  return element;
}

function chart(id, title, samples, series, format, top = null) {
  const width = Math.min(document.documentElement.clientWidth - 32, 1024);
  const [height, left, bottom] = [200, 88, 22];
  const highest = top ?? (Math.max(...series.flatMap((each) => each.values.filter((v) => v !== null)), 0) || 1);
  const first = samples[0].began_at;
  const span = Math.max(samples.at(-1).began_at + samples.at(-1).num_s - first, 1);
  const x = (at) => left + ((at - first) / span) * (width - left - 8);
  const y = (value) => 8 + (1 - value / highest) * (height - bottom - 8);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title });
  for (const share of [0, 0.5, 1]) {
    svg("line", { class: "grid", x1: left, x2: width - 8, y1: y(share * highest), y2: y(share * highest) }, drawing);
    svg("text", { x: left - 6, y: y(share * highest) + 4, "text-anchor": "end" }, drawing).textContent = format(share * highest);
  }
  for (const [share, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
    const at = { x: x(first + share * span), y: height - 4, "text-anchor": anchor };
    svg("text", at, drawing).textContent = clock(first + share * span);
  }
  const caption = document.createElement("figcaption");
  series.forEach(({ name, values }, i) => {
    let path = "";
    samples.forEach(({ began_at: start, num_s: length }, at) => {
      if (values[at] === null) return;
      const joins = at > 0 && values[at - 1] !== null;
      path += `${joins ? "L" : "M"}${x(start)} ${y(values[at])}H${x(start + length)}`;
    });
    svg("path", { class: `series series-${i}`, d: path || "M0 0" }, drawing);
    const entry = document.createElement("span");
    const dash = svg("svg", { viewBox: "0 0 48 12", "aria-hidden": "true" });
    svg("path", { class: `series series-${i}`, d: "M0 6H48" }, dash);
    const last = values.findLast((value) => value !== null);
    entry.append(dash, `${name}: ${last === undefined ? "none" : format(last)}`);
    caption.append(entry);
  });
  byId(id).replaceChildren(drawing, caption);
}

// What is shown

function showHistory(told) {
  const { samples, kept, since_start: start } = told;
  latest = told;
  byId("model").textContent = told.model;
  const saved = (label, sums) => {
    const cached = sum(Object.values(sums.cached_tokens));
    const values = [count(sums.prompt_tokens), count(cached), percent(cached, sums.prompt_tokens), duration(sums.saved_s)];
    return [label, ...values];
  };
  fill("saved", [
    saved(`last ${duration(told.now - kept.began_at)}`, kept),
    saved(`since the start, ${duration(told.now - start.began_at)} ago`, start),
  ]);
  const found = (tier) =>
    samples.map((each) => (each.prompt_tokens ? (each.cached_tokens[tier] ?? 0) / each.prompt_tokens : null));
  const share = (value) => `${(100 * value).toFixed(0)} %`;
  chart("hits", "Share of prompt tokens found in each tier, over time", samples, TIERS.map((tier) => ({ name: tier, values: found(tier) })), share, 1);
  const times = (source) => samples.map((each) => each.ttft[source]?.p50_s ?? null);
  chart("ttft-chart", "Median time to first token by source, over time", samples, SOURCES.map((name) => ({ name, values: times(name) })), duration);
  fill(
    "ttft",
    SOURCES.filter((source) => told.ttft[source]).map((source) => {
      const { num, p50_s: p50, p90_s: p90 } = told.ttft[source];
      return [source, count(num), duration(p50), duration(p90)];
    }),
  );
  const rate = (move) => samples.map((each) => (each.num_s ? (each.moved_bytes[move] ?? 0) / each.num_s : null));
  const moves = Object.entries(MOVES).map(([move, name]) => ({ name, values: rate(move) }));
  chart("moves", "Bytes moved between tiers a second, over time", samples, moves, (value) => `${bytes(value)}/s`);
}

function showTiers(tiers) {
  fill(
    "tiers",
    TIERS.filter((tier) => tiers[tier]).map((tier) => {
      const { blocks, bytes_live: live, bytes_files: files, bytes_budget: size } = tiers[tier];
      const held = files ?? live;
      return [tier, count(blocks), bytes(held), bytes(size), gauge(size ? held / size : 0)];
    }),
  );
  const lifetimes = tiers.disk?.lifetimes;
  byId("warning").hidden = !lifetimes?.shortfall;
  byId("warning").textContent = lifetimes?.shortfall ? `The disk is too small: ${lifetimes.shortfall}` : "";
  const policies = lifetimes ? Object.keys({ ...lifetimes.write_bytes_per_s, ...lifetimes.num_evicted }) : [];
  fill(
    "lifetimes",
    policies.sort().map((policy) => {
      const of = (name) => lifetimes[name][policy];
      const rate = of("write_bytes_per_s");
      const times = ["promised_s", "expected_s"].map((name) => duration(of(name)));
      const ages = ["evicted_age_p1_s", "evicted_age_p50_s"].map((name) => duration(of(name)));
      const written = rate === undefined ? "–" : `${bytes(rate)}/s`;
      return [policy, written, ...times, count(of("num_evicted") ?? 0), ...ages, count(of("num_expired") ?? 0)];
    }),
  );
}

function showSlowest(requests) {
  byId("no-slowest").hidden = requests.length > 0;
  fill(
    "slowest",
    requests.map((each) => {
      const cached = TIERS.filter((tier) => each.cached_tokens[tier]);
      const computed = each.prompt_tokens - sum(Object.values(each.cached_tokens));
      const before = Math.max(0, each.ttft_s - each.queue_s - each.prefill_s);
      const parts = [...cached.map((tier) => `${tier} ${count(each.cached_tokens[tier])}`), `computed ${count(computed)}`];
      return [
        clock(each.at, { second: "2-digit" }),
        each.tenant,
        ...[each.ttft_s, before, each.queue_s, each.prefill_s].map(duration),
        count(each.prompt_tokens),
        parts.join(", "),
        each.miss_reason && (MISSES[each.miss_reason] ?? each.miss_reason),
      ];
    }),
  );
}

function showTenants(tenants, tiers) {
  const size = tiers.disk?.bytes_budget ?? 0;
  fill(
    "tenants",
    tenants.map((tenant) => {
      const held = tiers.tenants?.[tenant.id]?.bytes ?? 0;
      return [
        tenant.name,
        percent(tenant.share, 1),
        count(tenant.num_answers),
        count(tenant.prompt_tokens),
        percent(tenant.cached_tokens, tenant.prompt_tokens),
        size ? bytes(held) : "–",
        percent(held, size),
      ];
    }),
  );
}

function tiersOf({ blocks, blocks_by_tier: held }) {
  const part = (tier) => (held[tier] < blocks ? `${tier} ${count(held[tier])} of ${count(blocks)}` : tier);
  return TIERS.filter((tier) => held[tier]).map(part).join(", ");
}

function showLargest({ chains, engine }) {
  const now = serverTime();
  const tenantOf = (chain) =>
    latest.tenants.find(({ id }) => chain.namespace.startsWith(id))?.name ?? `namespace ${chain.namespace.slice(0, 12)}`;
  byId("listed").textContent = chains.length
    ? `The ${count(chains.length)} largest at ${clock(now, { second: "2-digit" })}.`
    : "No tier holds any prefix.";
  if (engine) byId("listed").textContent += " The engine does not answer, so prefixes that the disk does not have are left out.";
  fill(
    "largest",
    chains.map((each) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "Evict";
      button.setAttribute("aria-label", `Evict the prefix ${each.id.slice(0, 12)}`);
      button.addEventListener("click", () => evict(each, button));
      return [
        each.id.slice(0, 12),
        tenantOf(each),
        each.model,
        each.retention,
        tiersOf(each),
        each.tokens === null ? null : count(each.tokens),
        bytes(each.bytes),
        duration(Math.max(0, now - each.last_used)),
        duration(Math.max(0, each.expires_at_min - now)),
        count(each.hits),
        button,
      ];
    }),
  );
}

async function refresh() {
  clearTimeout(timer);
  const [history, tiers] = await Promise.all([ask("admin/history"), ask("admin/cache/df", {})]);
  ahead_s = history.now - Date.now() / 1000;
  showHistory(history);
  showSlowest(history.slowest);
  showTiers(tiers);
  showTenants(history.tenants, tiers);
  say(`Updated at ${clock(history.now)}.`);
  timer = setTimeout(() => refresh().catch(failed), REFRESH_MS);
}

async function listLargest() {
  byId("listed").textContent = "Listing…";
  try {
    showLargest(await ask("admin/cache/ls", { sort: "-size", limit: NUM_LARGEST }));
  } catch (error) {
    byId("listed").textContent = "";
    throw error;
  }
}

async function evict(each, button) {
  const what = `the prefix ${each.id.slice(0, 12)} (${count(each.blocks)} blocks, ${bytes(each.bytes)})`;
  if (!confirm(`Evict ${what} from every tier? Blocks that other prefixes share stay.`)) return;
  button.disabled = true;
  try {
    const told = await ask("admin/cache/evict", { ids: [each.id] });
    await Promise.all([listLargest(), refresh()]);
    const onDisk = told.disk?.evicted_blocks ?? 0;
    const inMemory = told.evicted_blocks - onDisk;
    say(`Evicted ${count(inMemory)} copies of blocks from memory and ${count(onDisk)} from disk, ${bytes(told.freed_bytes)}.`);
    byId("list").focus();
  } catch (error) {
    button.disabled = false;
    failed(error);
  }
}

function failed(error) {
  if (key === null) return;
  say(error.message);
  clearTimeout(timer);
  timer = setTimeout(() => refresh().catch(failed), REFRESH_MS);
}

function signOut(text) {
  clearTimeout(timer);
  session.abort();
  session = new AbortController();
  key = latest = null;
  byId("figures").hidden = byId("sign-out").hidden = true;
  byId("sign-in").hidden = false;
  for (const part of document.querySelectorAll("tbody, figure")) part.replaceChildren();
  byId("model").textContent = byId("warning").textContent = byId("listed").textContent = "";
  byId("key").focus();
  say(text);
}

byId("sign-in").addEventListener("submit", async (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("key").value = "";
  try {
    await refresh();
  } catch (error) {
    signOut(error.message);
    return;
  }
  byId("sign-in").hidden = true;
  byId("figures").hidden = byId("sign-out").hidden = false;
  byId("figures").focus({ preventScroll: true });
});
byId("sign-out").addEventListener("click", () => signOut("The key is forgotten."));
byId("list").addEventListener("click", () => listLargest().catch(failed));
addEventListener("pagehide", () => signOut("The key is forgotten.")); // the browser may keep the page
addEventListener("resize", () => latest && showHistory(latest));
