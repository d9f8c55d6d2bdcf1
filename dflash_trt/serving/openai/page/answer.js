// Asks the server, and lays an answer's tokens over the text that it shows.
const $ = (id) => document.getElementById(id);
const make = (tag, className = "", textContent = "") => Object.assign(document.createElement(tag), { className, textContent });

// Codes that a terminal obeys and marks that turn a line around are shown, not obeyed.
const CODES = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;
const shown = (text) => text.replace(CODES, (one) => {
  const code = one.codePointAt(0);
  return code < 32 ? String.fromCodePoint(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
});

// The tab's key; in a browser that keeps nothing, the page's.
let key = null;
try {
  key = sessionStorage.getItem("key");
} catch {}

async function ask(path, options = {}) {
  for (;;) {
    const sent = key;
    const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
    const answer = await fetch(path, { ...options, headers, cache: "no-store" }).catch((error) => {
      throw error.name === "AbortError" ? error : new Error("The server does not answer.");
    });
    if (answer.ok) return answer;
    const told = await answer.json().catch(() => ({}));
    if (answer.status !== 401) throw new Error(told.error?.message ?? `${path}: HTTP ${answer.status}`);
    if (sent && sent === key) $("key-note").textContent = "That key is not good.";
    if (sent === key) await askKey();
  }
}

let asking = null;
function askKey() {
  return (asking ??= new Promise((resolve, reject) => {
    $("asks-key").onclose = () => {
      const given = $("key").value.trim();
      $("key").value = "";
      if (!given) return reject(new Error("The server asks for a key: load the page again to give one."));
      asking = null;
      key = given;
      try {
        sessionStorage.setItem("key", key);
      } catch {}
      resolve();
    };
    $("asks-key").showModal();
  }));
}

// Puts each token's characters into its element; text that fits no token goes to the next one.
class Tokens {
  all = [];
  waiting = [];
  decoder = new TextDecoder();
  hear(token, chance) {
    const one = { ...token, chance, text: "", element: make("span", token.origin) };
    one.element.dataset.at = this.all.push(one) - 1;
    this.waiting.push([one, this.decoder.decode(new Uint8Array(token.bytes), { stream: true })]);
  }
  write(text, place) {
    const into = document.createDocumentFragment();
    while (text) {
      const [one, wanted] = this.waiting[0] ?? [this.all.at(-1), text];
      const begins = text.startsWith(wanted) ? wanted : wanted.startsWith(text) ? text : null;
      const blank = wanted.length - wanted.trimStart().length;
      const used = begins ?? (blank || this.waiting.length > 1 ? "" : text); // a special token has no text
      const left = begins !== null ? wanted.slice(used.length) : blank ? wanted.trimStart() : "";
      if (used || !left) this.give(one, used, into);
      if (left) this.waiting[0][1] = left; // and an answer's first blank is not always shown
      else this.waiting.shift();
      text = text.slice(used.length);
    }
    place.append(into);
  }
  give(one, text, into) {
    if (one) one.text += text;
    (one?.element ?? into).append(shown(text));
    if (one && !one.element.parentNode) into.append(one.element);
  }
  end(place) { this.waiting.splice(0).forEach(([one]) => this.give(one, "", place)); }
}

// An answer while it comes: when which tokens were there, and the steps that brought them.
class Answer {
  tokens = new Tokens();
  moments = []; // [milliseconds, tokens by then]
  steps = []; // origins
  text = "";
  constructor(place) { this.place = place; }
  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    this.usage = chunk.usage ?? this.usage;
    const [choice] = chunk.choices;
    if (!choice) return;
    const chances = readChances(choice.logprobs);
    choice.tokens?.forEach((token, at) => this.hear(token, chances[at]));
    const { reasoning_content: thought, content = choice.text } = choice.delta ?? {};
    if (thought) this.tokens.write(thought, (this.thought ??= this.place.appendChild(make("div", "thought"))));
    if (content) this.tokens.write(content, (this.said ??= this.place.appendChild(make("div"))));
    this.text += content ?? "";
    this.reason = choice.finish_reason ?? this.reason;
    if (this.reason) this.tokens.end(this.said ?? this.place);
    if (choice.tokens?.length) this.moments.push([performance.now(), this.tokens.all.length]);
  }
  hear(token, chance) {
    this.tokens.hear(token, chance);
    if (this.tokens.all.length === 1) return; // the prompt's own pass brought it
    const last = this.steps.at(-1) ?? ["target"];
    if (last.at(-1) === "target") this.steps.push([token.origin]);
    else last.push(token.origin);
  }
  get length() { // tokens of a step
    const count = this.usage?.completion_tokens_details?.num_verify_steps ?? this.steps.length;
    return count ? (this.tokens.all.length - 1) / count : null;
  }
  rate(since = Infinity) { // tokens a second, of the last `since` milliseconds or of all behind the first
    if (this.moments.length < 2) return null;
    const [end, count] = this.moments.at(-1);
    const [begin, before] = this.moments.find(([at]) => at >= end - since);
    return end > begin ? ((count - before) / (end - begin)) * 1e3 : null;
  }
}

function readChances(given) {
  const likelier = (a, b) => b[1] - a[1];
  if (given?.content) return given.content.map((one) => [one.logprob, one.top_logprobs.map((top) => [top.token, top.logprob]).sort(likelier)]);
  return given?.token_logprobs?.map((one, at) => [one, Object.entries(given.top_logprobs?.[at] ?? {}).sort(likelier)]) ?? [];
}

// Streams an answer into `answer`; rejects with what the server said, or where it is gone.
async function stream(body, answer, signal, onChunk) {
  const asked = { model: served.model, stream: true, stream_options: { include_usage: true, include_tokens: true }, ...body };
  answer.asked = performance.now();
  const reply = await ask(body.messages ? "v1/chat/completions" : "v1/completions", { method: "POST", body: JSON.stringify(asked), signal });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = ""; ; onChunk()) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The server ended the answer before its end.");
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      if (event.startsWith("data: ")) answer.take(JSON.parse(event.slice(6)));
    }
  }
}
