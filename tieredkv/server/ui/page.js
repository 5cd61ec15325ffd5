// The operator's page. The admin key is a variable of this module: it is in no cookie, no storage
// and no URL. Everything that comes from the server is shown as text.

const REFRESH_MS = 60_000;
const NUM_LARGEST = 20;
const TIERS = ["device", "host", "disk"];
const MOVES = { "device,host": "device to host", "host,disk": "host to disk", "disk,host": "disk to host", "host,device": "host to device" };
const SOURCES = ["cold", "device", "host", "disk"];

let key = null;
let timer = null;
let latest = null; // what the charts show

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

const clock = (seconds) =>
  new Date(1000 * seconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });

// Asking the server

async function ask(path, body) {
  const bytesOfKey = String.fromCharCode(...new TextEncoder().encode(key));
  const headers = key ? { Authorization: `Bearer ${bytesOfKey}` } : {};
  const options = { headers, credentials: "omit", cache: "no-store", redirect: "error", referrerPolicy: "no-referrer" };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  const answer = await fetch(path, options);
  const told = await answer.json();
  if (!answer.ok) throw new Error(told.error?.message ?? `The server answered ${answer.status}.`);
  return told;
}

function say(text) {
  byId("status").textContent = text;
}

// Tables

function cell(value, name) {
  const td = document.createElement("td");
  if (value instanceof Node) td.append(value);
  else td.textContent = value ?? "–";
  if (name) td.className = name;
  return td;
}

function fill(id, rows) {
  const table = byId(id);
  const titles = [...table.tHead.rows[0].cells].map((each) => each.textContent);
  table.hidden = !rows.length;
  table.tBodies[0].replaceChildren(
    ...rows.map((values) => {
      const row = document.createElement("tr");
      row.append(...values);
      [...row.cells].forEach((each, i) => each.setAttribute("data-label", titles[i]));
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
  const width = Math.min(document.documentElement.clientWidth - 32, 928);
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
    return [label, ...values].map((value) => cell(value));
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
      return [source, count(num), duration(p50), duration(p90)].map((value) => cell(value));
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
      return [cell(tier), cell(count(blocks)), cell(bytes(held)), cell(bytes(size)), cell(gauge(size ? held / size : 0))];
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
      const values = [policy, rate === undefined ? "–" : `${bytes(rate)}/s`, ...times];
      return [...values, count(of("num_evicted") ?? 0), ...ages, count(of("num_expired") ?? 0)].map((value) => cell(value));
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
        cell(tenant.name, "name"),
        cell(percent(tenant.share, 1)),
        cell(count(tenant.num_answers)),
        cell(count(tenant.prompt_tokens)),
        cell(percent(tenant.cached_tokens, tenant.prompt_tokens)),
        cell(size ? bytes(held) : "–"),
        cell(percent(held, size)),
      ];
    }),
  );
}

function showLargest(chains, now) {
  fill(
    "largest",
    chains.map((each) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = "Evict";
      button.setAttribute("aria-label", `Evict the prefix ${each.id.slice(0, 12)}`);
      button.addEventListener("click", () => evict(each, button));
      return [
        cell(each.id.slice(0, 12), "id"),
        cell(each.namespace.slice(0, 12), "id"),
        cell(each.model, "name"),
        cell(each.retention),
        cell(each.tokens === null ? null : count(each.tokens)),
        cell(bytes(each.bytes)),
        cell(duration(Math.max(0, now - each.last_used))),
        cell(duration(Math.max(0, each.expires_at_min - now))),
        cell(count(each.hits)),
        cell(button),
      ];
    }),
  );
}

async function refresh() {
  clearTimeout(timer);
  const [history, tiers] = await Promise.all([ask("admin/history"), ask("admin/cache/df", {})]);
  if (key === null) return;
  showHistory(history);
  showTiers(tiers);
  showTenants(history.tenants, tiers);
  byId("on-disk").hidden = !tiers.disk;
  say(`Updated at ${clock(history.now)}.`);
  timer = setTimeout(() => refresh().catch(failed), REFRESH_MS);
}

async function listLargest() {
  const { chains } = await ask("admin/cache/ls", { filter: "tier=disk", sort: "-size", limit: NUM_LARGEST });
  showLargest(chains, Date.now() / 1000);
}

async function evict(each, button) {
  const what = `the prefix ${each.id.slice(0, 12)} (${count(each.blocks)} blocks, ${bytes(each.bytes)})`;
  if (!confirm(`Evict ${what} from every tier? Blocks that other prefixes share stay.`)) return;
  button.disabled = true;
  try {
    const told = await ask("admin/cache/evict", { ids: [each.id] });
    await Promise.all([listLargest(), refresh()]);
    say(`Evicted ${count(told.evicted_blocks)} blocks, ${bytes(told.freed_bytes)}.`);
  } catch (error) {
    button.disabled = false;
    failed(error);
  }
}

function failed(error) {
  say(error.message);
  clearTimeout(timer);
  if (key !== null) timer = setTimeout(() => refresh().catch(failed), REFRESH_MS);
}

function signOut(text) {
  clearTimeout(timer);
  key = latest = null;
  byId("figures").hidden = byId("sign-out").hidden = true;
  byId("sign-in").hidden = false;
  for (const part of document.querySelectorAll("tbody, figure")) part.replaceChildren();
  byId("model").textContent = byId("warning").textContent = "";
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
  if (!byId("on-disk").hidden) await listLargest().catch(failed);
});
byId("sign-out").addEventListener("click", () => signOut("The key is forgotten."));
byId("list-again").addEventListener("click", () => listLargest().catch(failed));
addEventListener("resize", () => latest && showHistory(latest));
