// A conversation, kept in this browser; its tokens in the colours of their origin.
const KEPT = 20;
const WELCOME = "Every answer shows where its tokens come from. Hover or tap one, or walk with the arrow keys, to see how likely it was.";
let chat = { id: Date.now(), messages: [] };
let running = null;

const chats = () => JSON.parse(localStorage.getItem("chats") ?? "[]");

function keep() {
  const others = chats().filter((one) => one.id !== chat.id);
  for (let kept = [chat, ...others].slice(0, KEPT); kept.length; kept.pop()) {
    try {
      localStorage.setItem("chats", JSON.stringify(kept));
      break;
    } catch {} // full: without the oldest, then
  }
  listChats();
}

function listChats() {
  const options = chats().map((one) => new Option(shown(one.messages[0].content).slice(0, 40), one.id, false, one.id === chat.id));
  $("past").replaceChildren(...(chat.messages.length ? [] : [new Option("this one", "")]), ...options);
}

function showChat() {
  $("log").replaceChildren(...(chat.messages.length ? [] : [make("p", "hint", WELCOME)]));
  for (const message of chat.messages) {
    const place = addMessage(message.role, message.role === "user" ? message.content : "");
    for (const [className, pieces] of [["thought", message.thought ?? []], ["", message.pieces ?? []]]) {
      const part = pieces.length ? place.appendChild(make("div", className)) : null;
      for (const [text, origin] of pieces) part.append(make("span", origin, shown(text)));
    }
  }
  listChats();
}

function addMessage(role, text) {
  const place = make("div", `message ${role === "user" ? "user" : "answer"}`, shown(text));
  place.dir = "auto";
  if (role !== "user") {
    place.tabIndex = 0;
    place.setAttribute("role", "group");
    place.setAttribute("aria-label", "Answer; the arrow keys go from token to token");
  }
  return $("log").appendChild(place);
}

function readSettings(prompt) {
  const schema = $("schema").value.trim();
  const top = $("chances").checked ? 4 : null;
  const body = {
    temperature: Number($("temperature").value),
    seed: Number($("seed").value),
    max_tokens: Number($("most").value),
    speculate: $("drafts").checked,
    ...(schema && { response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } } }),
  };
  if (!served.chats) return { ...body, prompt, ...(top && { logprobs: top }) };
  const system = $("system").value.trim();
  const said = chat.messages.map(({ role, content }) => ({ role, content }));
  return {
    ...body,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...said],
    ...(top && { logprobs: true, top_logprobs: top }),
    ...(served.thinks && { chat_template_kwargs: { enable_thinking: $("thinks").checked } }),
  };
}

async function send() {
  const prompt = $("prompt").value;
  if (!prompt.trim() || running) return;
  chat.messages.push({ role: "user", content: prompt });
  let body;
  try {
    body = readSettings(prompt);
  } catch {
    chat.messages.pop();
    return alarm("The schema is no JSON.");
  }
  alarm("");
  if (chat.messages.length === 1) $("log").replaceChildren();
  addMessage("user", prompt);
  $("prompt").value = "";
  const place = addMessage("assistant", "");
  const answer = (place.answer = new Answer(place));
  await run([[body, answer]], place).catch((error) => {
    place.append(make("em", "ended", error.name === "AbortError" ? "stopped" : shown(error.message)));
    if (error.name !== "AbortError") alarm(error.message);
  });
  const pieces = [[], []];
  for (const one of answer.tokens.all) pieces[Number(answer.thinking?.contains(one.element) ?? false)].push([one.text, one.origin]);
  if (answer.text || answer.thought) chat.messages.push({ role: "assistant", content: answer.text, pieces: pieces[0], thought: pieces[1] });
  else chat.messages.pop();
  if (chat.messages.length) keep();
}

// Streams answers one after the other, with the buttons of both views in that state.
async function run(asked, place) {
  running = new AbortController();
  const isNear = () => innerHeight + scrollY > document.body.scrollHeight - 120;
  const mark = (runs) => {
    $("send").hidden = runs;
    $("stop").hidden = !runs;
    $("start").textContent = runs ? "Stop" : "Race";
    place?.setAttribute("aria-busy", runs);
  };
  mark(true);
  try {
    for (const [body, answer] of asked) {
      answer.asked = performance.now();
      await stream(body, answer, running.signal, () => {
        showFigures(answer);
        if (place && isNear()) scrollTo(0, document.body.scrollHeight);
      });
      showFigures(answer);
    }
  } finally {
    running = null;
    mark(false);
  }
}

function showDetail(element) {
  document.querySelector(".current")?.classList.remove("current");
  const answer = element?.closest(".message")?.answer;
  const one = answer?.tokens.all[element.dataset.at];
  $("detail").hidden = !one;
  if (!one) return;
  element.classList.add("current");
  const [chance, tops] = one.chance ?? [];
  const table = make("table");
  for (const [text, value] of tops ?? []) {
    const row = table.insertRow();
    row.insertCell().textContent = shown(JSON.stringify(text).slice(1, -1));
    row.insertCell().textContent = `${number(Math.exp(value) * 100)} %`;
  }
  const likely = chance == null ? "" : `, ${number(Math.exp(chance) * 100)} % (log-probability ${number(chance, 2)})`;
  $("detail").replaceChildren(make("strong", "", shown(JSON.stringify(one.text))), `, ${WORDS[one.origin]}${likely}`, table);
  const at = element.getBoundingClientRect();
  const box = $("detail").getBoundingClientRect();
  $("detail").style.left = `${Math.max(8, Math.min(at.left, innerWidth - box.width - 8))}px`;
  $("detail").style.top = `${at.bottom + box.height + 12 < innerHeight ? at.bottom + 6 : Math.max(8, at.top - box.height - 6)}px`;
}

function openChat() {
  $("composer").addEventListener("submit", (event) => (event.preventDefault(), send()));
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) event.preventDefault(), send();
  });
  $("stop").addEventListener("click", () => running?.abort());
  $("fresh").addEventListener("click", () => (running?.abort(), (chat = { id: Date.now(), messages: [] }), showChat(), $("prompt").focus()));
  $("past").addEventListener("change", (event) => {
    chat = chats().find((one) => String(one.id) === event.target.value) ?? chat;
    showChat();
  });
  for (const kind of ["mouseover", "click"]) $("log").addEventListener(kind, (event) => showDetail(event.target.closest("[data-at]")));
  $("log").addEventListener("mouseleave", () => showDetail(null));
  $("log").addEventListener("focusout", () => showDetail(null));
  $("log").addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const all = event.target.answer?.tokens.all;
    if (!by || !all?.length) return;
    event.preventDefault();
    const at = event.target.querySelector(".current")?.dataset.at;
    showDetail(all[Math.max(0, Math.min(all.length - 1, at === undefined ? 0 : Number(at) + by))].element);
  });
  showChat();
}
