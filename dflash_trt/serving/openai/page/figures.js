// Figures of the answer that comes, and of the server.
const LOOK_MS = 1200;
const DASH = "–";
const number = (value, digits = 1) =>
  value == null ? DASH : value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });

function draw(place, width, height, shapes, told) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  for (const [tag, given, text = ""] of shapes) {
    const shape = document.createElementNS(svg.namespaceURI, tag);
    for (const [name, value] of Object.entries(given)) shape.setAttribute(name, value);
    shape.textContent = text;
    svg.append(shape);
  }
  place.replaceChildren(svg);
  place.setAttribute("aria-label", told);
}

function drawSlots(steps) {
  const size = Math.max(1, ...steps.map((one) => one.filter((origin) => origin !== "target").length), served.block - 1);
  const shares = Array.from({ length: size }, (_, slot) => {
    const kept = steps.filter((one) => one[slot] && one[slot] !== "target").length;
    return steps.length ? kept / steps.length : 0;
  });
  const wide = 320 / size;
  const shapes = shares.flatMap((share, slot) => {
    const at = { x: slot * wide + 2, width: wide - 4, rx: 2 };
    return [
      ["rect", { ...at, y: 0, height: 70, class: "empty" }],
      ["rect", { ...at, y: 70 * (1 - share), height: 70 * share, class: "draft" }],
      ["text", { x: (slot + 0.5) * wide, y: 84, "text-anchor": "middle" }, size > 16 ? "" : `${Math.round(share * 100)}%`],
    ];
  });
  draw($("slots"), 320, 88, shapes, `Of ${steps.length} steps, slots kept: ${shares.map((one) => `${Math.round(one * 100)}%`).join(", ")}`);
}

function drawSteps(steps) {
  const last = steps.slice(-40);
  const high = Math.max(served.block, ...last.map((one) => one.length));
  const tall = 96 / high;
  const shapes = last.flatMap((one, at) =>
    one.map((origin, up) => ["rect", { x: at * 8, y: 96 - (up + 1) * tall, width: 6.5, height: Math.max(tall - 1, 0.6), rx: 1, class: origin }]),
  );
  draw($("steps"), 320, 96, shapes, `The last steps brought ${last.map((one) => one.length).join(", ") || "no"} tokens`);
}

let due = null;
function showFigures(answer) {
  due ??= requestAnimationFrame(() => {
    due = null;
    $("now").textContent = number(answer.rate(answer.reason ? 0 : 1000));
    $("overall").textContent = number(answer.rate());
    $("length").textContent = number(answer.length, 2);
    $("first").textContent = answer.firstAfter == null ? DASH : `${number(answer.firstAfter * 1e3, 0)} ms`;
    drawSlots(answer.allSteps);
    drawSteps(answer.allSteps);
  });
}

const served = { model: null, chats: false, block: 8, tuned: null };

function readFigures(text) {
  const found = {};
  for (const [, name, labels, value] of text.matchAll(/^(dflash_\w+)(?:\{(.*)\})? (\S+)$/gm)) {
    const named = Object.fromEntries([...(labels ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, key, one]) => [key, one]));
    found[name] ??= { labels: named, value: Number(value) };
  }
  return found;
}

function showServed(found) {
  const about = found.dflash_build_info?.labels ?? {};
  const value = (name) => found[`dflash_${name}`]?.value ?? 0;
  served.block = Number(about.block_size) || served.block;
  served.tuned = about.tuned_ratio || null;
  if (!$("slots").firstChild) drawSlots([]), drawSteps([]);
  const rows = {
    Bundle: about.model,
    Drafter: about.drafter,
    "Block schedule": about.block_schedule,
    Running: `${value("active_slots")} of ${value("slots")}`,
    Waiting: value("waiting_requests"),
    "Caches used": `${number(value("cache_usage_ratio") * 100)} %, ${number(value("cached_tokens"), 0)} tokens`,
    "Acceptance length, all": number(found.dflash_acceptance_length?.value, 2),
    "Output tokens": number(value("output_tokens_total"), 0),
    Version: about.version,
  };
  $("served").replaceChildren(...Object.entries(rows).flatMap(([name, one]) => [make("dt", "", name), make("dd", "", shown(String(one ?? DASH)))]));
}

function alarm(what) {
  $("alert").hidden = !what;
  $("alert").textContent = what;
}

// Looks only while the page is seen; a server that is gone is told, and so is its return.
let gone = false;
async function look() {
  if (document.hidden) return;
  let trouble = "";
  try {
    const reply = await fetch("metrics", { cache: "no-store", signal: AbortSignal.timeout(LOOK_MS) });
    const found = readFigures(await reply.text());
    if (found.dflash_ready?.value) {
      showServed(found);
      if (!served.model) await begin();
    } else trouble = "The model is not ready; this page waits for it.";
  } catch {
    trouble = "The server does not answer; this page goes on asking.";
  }
  $("state").className = trouble ? "" : "ready";
  if ($("state").textContent !== (trouble ? "not ready" : "ready")) $("state").textContent = trouble ? "not ready" : "ready";
  if (trouble || gone) alarm(trouble);
  gone = Boolean(trouble);
}

async function watch() {
  for (;;) {
    const rest = new Promise((resolve) => setTimeout(resolve, LOOK_MS));
    await look().catch((error) => alarm(error.message));
    await rest;
  }
}
