// Figures of the answer that comes, and of the server.
const LOOK_MS = 1000;
const PATIENCE_MS = 1500;
const DASH = "–";
const served = { model: null, chats: false, block: 8, tuned: null };
const number = (value, digits = 1) =>
  value?.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits }) ?? DASH;

function draw(place, height, shapes, told) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 320 ${height}`);
  for (const [tag, given, text = ""] of shapes) {
    const shape = svg.appendChild(document.createElementNS(svg.namespaceURI, tag));
    for (const [name, value] of Object.entries(given)) shape.setAttribute(name, value);
    shape.textContent = text;
  }
  place.replaceChildren(svg);
  place.setAttribute("aria-label", told);
}

function drawSteps(steps) {
  const kept = steps.map((one) => one.filter((origin) => origin !== "target").length);
  const size = Math.max(1, ...kept, served.block - 1);
  const shares = Array.from({ length: size }, (_, slot) => kept.filter((one) => one > slot).length / (steps.length || 1));
  const percents = shares.map((one) => `${Math.round(one * 100)}%`);
  const wide = 320 / size;
  const slots = shares.flatMap((share, slot) => {
    const at = { x: slot * wide + 2, width: wide - 4, rx: 2 };
    const label = { x: (slot + 0.5) * wide, y: 84, "text-anchor": "middle" };
    const bar = { ...at, y: 70 - 70 * share, height: 70 * share, class: "draft" };
    return [["rect", { ...at, y: 0, height: 70, class: "empty" }], ["rect", bar], ["text", label, size > 10 ? "" : percents[slot]]];
  });
  draw($("slots"), 88, slots, `Of ${steps.length} steps, slots kept: ${percents.join(", ")}`);
  const last = steps.slice(-40);
  const tall = 96 / Math.max(served.block, ...last.map((one) => one.length));
  const stack = (one, at) => one.map((origin, up) =>
    ["rect", { x: at * 8, y: 96 - (up + 1) * tall, width: 6.5, height: Math.max(tall - 1, 0.6), rx: 1, class: origin }]);
  draw($("steps"), 96, last.flatMap(stack), `The last steps brought ${last.map((one) => one.length).join(", ") || "no"} tokens`);
}

let due = null;
function showFigures(answer) {
  due ??= requestAnimationFrame(() => {
    due = null;
    const [first] = answer.moments;
    $("now").textContent = number(answer.rate(answer.reason ? Infinity : 1000));
    $("overall").textContent = number(answer.rate());
    $("length").textContent = number(answer.length, 2);
    $("first").textContent = first ? `${number(first[0] - answer.asked, 0)} ms` : DASH;
    drawSteps(answer.steps);
  });
}

function readFigures(text) {
  const found = {};
  for (const [, name, labels = "", value] of text.matchAll(/^(dflash_\w+)(?:\{(.*)\})? (\S+)$/gm)) {
    const named = [...labels.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map((one) => one.slice(1));
    found[name] ??= { labels: Object.fromEntries(named), value: Number(value) };
  }
  return found;
}

function showServed(found) {
  const about = found.dflash_build_info?.labels ?? {};
  const value = (name) => found[`dflash_${name}`]?.value;
  served.block = Number(about.block_size) || served.block;
  served.tuned = about.tuned_ratio;
  if (!$("slots").firstChild) drawSteps([]);
  const rows = {
    Bundle: about.model,
    Drafter: about.drafter,
    "Block schedule": about.block_schedule,
    Running: `${value("active_slots") ?? DASH} of ${value("slots") ?? DASH}`,
    Waiting: value("waiting_requests"),
    "Caches used": `${number(value("cache_usage_ratio") * 100)} %, ${number(value("cached_tokens"), 0)} tokens`,
    "Acceptance length, all": number(value("acceptance_length"), 2),
    "Output tokens": number(value("output_tokens_total"), 0),
    Version: about.version,
  };
  const pairs = Object.entries(rows).flatMap(([name, one]) => [make("dt", "", name), make("dd", "", shown(String(one ?? DASH)))]);
  $("served").replaceChildren(...pairs);
}

const alarm = (what) => Object.assign($("alert"), { hidden: !what, textContent: what });

// Looks only while the page is seen; a server that is gone is told, and so is its return.
let beginning = null;
async function look(wasGone) {
  let trouble = "The server does not answer; this page goes on asking.";
  try {
    const reply = await fetch("metrics", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    const found = readFigures(await reply.text());
    trouble = found.dflash_ready?.value ? "" : "The model is not ready; this page waits for it.";
    if (!trouble) showServed(found);
  } catch {}
  const state = trouble ? "gone" : "ready";
  if ($("state").textContent !== state) $("state").textContent = $("state").className = state;
  if (trouble || wasGone) alarm(trouble);
  // Not awaited: it may wait for a key while the server goes.
  if (!trouble && (wasGone || !served.model))
    beginning ??= begin().catch((error) => alarm(error.message)).finally(() => (beginning = null));
  return Boolean(trouble);
}

async function watch() {
  for (let gone = false; ; await new Promise((resolve) => setTimeout(resolve, LOOK_MS)))
    if (!document.hidden) gone = await look(gone);
}
