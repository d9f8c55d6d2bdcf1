// Conversations, kept in this browser; their tokens in the colours of their origin.
const KEPT = 20;
const WELCOME = "Every answer shows where its tokens come from. Point at one, or walk with the arrow keys, to see how likely it was.";
let chat = { id: Date.now(), messages: [] };
let running = null;
const PLACE = "dflash-trt.chats";
const chats = () => {
  try {
    const kept = JSON.parse(localStorage.getItem(PLACE));
    return Array.isArray(kept) ? kept.filter((one) => typeof one?.messages?.[0]?.content === "string") : [];
  } catch {
    return []; // no storage here, or what another wrote
  }
};

function keep(mine) {
  for (let kept = [mine, ...chats().filter((one) => one.id !== mine.id)].slice(0, KEPT); kept.length; kept.pop()) {
    try {
      return localStorage.setItem(PLACE, JSON.stringify(kept));
    } catch {} // full: without the oldest, then
  }
}

function showChat() {
  $("log").replaceChildren(...(chat.messages.length ? [] : [make("p", "hint", WELCOME)]));
  for (const { role, content, pieces, thought } of chat.messages) {
    const place = addMessage(role, role === "user" ? content : "");
    for (const [className, said] of [["thought", thought], ["", pieces]]) {
      if (said?.length) place.appendChild(make("div", className)).append(...said.map(([text, origin]) => make("span", origin, shown(text))));
    }
  }
  listChats();
}

function listChats() {
  const option = (one) => new Option(shown(one.messages[0].content).slice(0, 40), one.id, false, one.id === chat.id);
  $("past").replaceChildren(...(chat.messages.length ? [] : [new Option("this one", "")]), ...chats().map(option));
}

function addMessage(role, text) {
  const place = make("div", `message ${role === "user" ? "user" : "answer"}`, shown(text));
  const told = { role: "group", tabindex: 0, "aria-label": "Answer" };
  for (const [name, value] of Object.entries(role === "user" ? {} : told)) place.setAttribute(name, value);
  place.dir = "auto";
  return $("log").appendChild(place);
}

function readNumbers(prefix) {
  const [temperature, seed, max_tokens] = ["temperature", "seed", "most"].map((name) => Number($(prefix + name).value));
  return { temperature, seed, max_tokens };
}

function readSettings(prompt) {
  const [schema, system, top] = [$("schema").value.trim(), $("system").value.trim(), $("chances").checked && 4];
  const format = schema && { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } };
  const body = { ...readNumbers(""), speculate: $("drafts").checked, ...(format && { response_format: format }) };
  if (!served.chats) return { ...body, prompt, ...(top && { logprobs: top }) };
  const messages = chat.messages.map(({ role, content }) => ({ role, content }));
  if (system) messages.unshift({ role: "system", content: system });
  const thinks = served.thinks && { chat_template_kwargs: { enable_thinking: $("thinks").checked } };
  return { ...body, messages, ...(top && { logprobs: true, top_logprobs: top }), ...thinks };
}

async function send() {
  const prompt = $("prompt").value;
  if (!prompt.trim() || running) return;
  const mine = chat;
  mine.messages.push({ role: "user", content: prompt });
  let body;
  try {
    body = readSettings(prompt);
  } catch {
    mine.messages.pop();
    return alarm("The schema is no JSON.");
  }
  alarm("");
  if (mine.messages.length === 1) $("log").replaceChildren();
  addMessage("user", prompt);
  $("prompt").value = "";
  const place = addMessage("assistant", "");
  const answer = (place.answer = new Answer(place));
  place.setAttribute("aria-label", "Answer; the arrow keys go from token to token");
  await run([[body, answer]], place).catch((error) => {
    if (error.name !== "AbortError") $("prompt").value ||= prompt;
    place.append(make("em", "", error.name === "AbortError" ? "stopped" : shown(error.message)));
  });
  const pieces = (thinks) => answer.tokens.all
    .filter((one) => Boolean(answer.thought?.contains(one.element)) === thinks)
    .map((one) => [one.text, one.origin]);
  if (answer.text || answer.tokens.all.length) mine.messages.push({ role: "assistant", content: answer.text, pieces: pieces(false), thought: pieces(true) });
  else mine.messages.pop();
  if (mine.messages.length) keep(mine), listChats();
}

// Streams answers one after the other, with the buttons of both views in that state.
async function run(asked, place) {
  const mark = (runs) => {
    running = runs ? new AbortController() : null;
    $("stop").hidden = !($("send").hidden = runs);
    $("start").textContent = runs ? "Stop" : "Race";
    place?.setAttribute("aria-busy", runs);
  };
  const follow = (answer) => {
    showFigures(answer);
    if (place && innerHeight + scrollY > document.body.scrollHeight - 120) scrollTo(0, document.body.scrollHeight);
  };
  mark(true);
  try {
    for (const [body, answer] of asked) await stream(body, answer, running.signal, () => follow(answer)), follow(answer);
  } finally {
    mark(false);
  }
}

function showDetail(element) {
  document.querySelector(".current")?.classList.remove("current");
  const one = element?.closest(".message")?.answer.tokens.all[element.dataset.at];
  const detail = $("detail");
  detail.hidden = !one;
  if (!one) return;
  element.classList.add("current");
  const [chance, tops = []] = one.chance ?? [];
  const table = make("table");
  for (const [text, value] of tops) {
    const cells = [shown(JSON.stringify(text)), `${number(Math.exp(value) * 100)} %`];
    table.insertRow().append(...cells.map((one) => make("td", "", one)));
  }
  const likely = chance == null ? "" : `, ${number(Math.exp(chance) * 100)} % (log-probability ${number(chance, 2)})`;
  detail.replaceChildren(make("strong", "", shown(JSON.stringify(one.text))), `, ${document.querySelector(`.legend .${one.origin}`).textContent}${likely}`, table);
  const [at, box] = [element.getBoundingClientRect(), detail.getBoundingClientRect()];
  const top = at.bottom + box.height + 12 < innerHeight ? at.bottom + 6 : Math.max(8, at.top - box.height - 6);
  Object.assign(detail.style, { left: `${Math.max(8, Math.min(at.left, innerWidth - box.width - 8))}px`, top: `${top}px` });
}

function walk(event) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const all = event.target.answer?.tokens.all;
  if (!by || !all?.length) return;
  event.preventDefault();
  const at = Number(event.target.querySelector(".current")?.dataset.at ?? -by) + by;
  showDetail(all[Math.max(0, Math.min(all.length - 1, at))].element);
}

function openChat() {
  const log = $("log");
  $("composer").onsubmit = (event) => (event.preventDefault(), send());
  $("prompt").onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) event.preventDefault(), send();
  };
  $("stop").onclick = () => running?.abort();
  $("fresh").onclick = () => (running?.abort(), (chat = { id: Date.now(), messages: [] }), showChat(), $("prompt").focus());
  $("past").onchange = ({ target }) => (running?.abort(), (chat = chats().find((one) => `${one.id}` === target.value) ?? chat), showChat());
  log.onmouseover = log.onclick = (event) => showDetail(event.target.closest("[data-at]"));
  log.onmouseleave = () => showDetail(null);
  log.addEventListener("focusout", () => showDetail(null));
  log.onkeydown = walk;
  showChat();
}
