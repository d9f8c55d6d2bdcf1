// Asks the server, and lays an answer's tokens over the text that it shows.
const $ = (id) => document.getElementById(id);
const WORDS = { draft: "accepted draft", target: "target’s own", grammar: "forced by the grammar" };

function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

// Codes that a terminal obeys and marks that turn a line around are shown, not obeyed.
function shown(text) {
  return text.replace(/[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, (one) => {
    const code = one.codePointAt(0);
    return code < 32 ? String.fromCodePoint(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

async function ask(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem("key");
    const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const answer = await fetch(path, { ...options, headers, cache: "no-store" }).catch((error) => {
      throw error.name === "AbortError" ? error : new Error("The server does not answer.");
    });
    if (answer.ok) return answer;
    if (answer.status !== 401) {
      const told = await answer.json().catch(() => ({}));
      throw new Error(told.error?.message ?? `${path}: HTTP ${answer.status}`);
    }
    await askKey();
  }
}

let asking = null;
function askKey() {
  asking ??= new Promise((resolve, reject) => {
    $("asks-key").onclose = () => {
      asking = null;
      const key = $("key").value.trim();
      $("key").value = "";
      if (!key) return reject(new Error("the server asks for a key"));
      sessionStorage.setItem("key", key);
      resolve();
    };
    $("asks-key").showModal();
  });
  return asking;
}

// Puts each token's characters into its element; text that fits no token goes to the next one.
class Tokens {
  constructor(most = Infinity) {
    this.decoder = new TextDecoder();
    this.waiting = [];
    this.all = [];
    this.most = most;
  }
  hear(token, chance) {
    const one = { ...token, chance, text: "", element: make("span", token.origin) };
    one.element.dataset.at = this.all.push(one) - 1;
    this.waiting.push([one, this.decoder.decode(new Uint8Array(token.bytes), { stream: true })]);
  }
  write(text, place) {
    const into = document.createDocumentFragment();
    while (text) {
      const head = this.waiting[0];
      if (!head) {
        this.give(this.all.at(-1), text, into);
        break;
      }
      const [one, wanted] = head;
      const begins = text.startsWith(wanted) ? wanted : wanted.startsWith(text) ? text : null;
      if (begins !== null) {
        this.give(one, begins, into);
        text = text.slice(begins.length);
        head[1] = wanted.slice(begins.length);
        if (!head[1]) this.waiting.shift();
      } else if (wanted !== wanted.trimStart()) {
        head[1] = wanted.trimStart(); // the first blank of an answer is not always shown
      } else if (this.waiting.length > 1) {
        this.give(this.waiting.shift()[0], "", into); // a special token, say
      } else {
        this.give(this.waiting.shift()[0], text, into);
        break;
      }
    }
    place.append(into);
  }
  give(one, text, into) {
    if (!one) return into.append(shown(text));
    one.text += text;
    one.element.append(shown(text));
    if (!one.element.parentNode) into.append(one.element);
  }
  end(place) {
    for (const [one] of this.waiting.splice(0)) if (!one.element.parentNode) place.append(one.element);
  }
}

// An answer while it comes: when which tokens were there, and the steps that brought them.
class Answer {
  constructor(place) {
    this.asked = performance.now();
    this.place = place;
    this.tokens = new Tokens();
    this.moments = [];
    this.steps = [];
    this.open = [];
    this.text = "";
    this.thought = "";
    this.usage = null;
    this.reason = null;
  }
  take(chunk) {
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const chances = choice.logprobs ? readChances(choice.logprobs) : [];
    for (const [at, token] of (choice.tokens ?? []).entries()) this.hear(token, chances[at]);
    const { reasoning_content: thought, content = choice.text } = choice.delta ?? {};
    if (thought) {
      this.thought += thought;
      this.thinking ??= this.place.appendChild(make("div", "thought"));
      this.tokens.write(thought, this.thinking);
    }
    if (content) {
      this.text += content;
      this.tokens.write(content, (this.said ??= this.place.appendChild(make("div"))));
    }
    this.reason = choice.finish_reason ?? this.reason;
    if (this.reason) this.tokens.end(this.said ?? this.place);
    if (choice.tokens?.length) this.moments.push([performance.now(), this.tokens.all.length]);
  }
  hear(token, chance) {
    this.tokens.hear(token, chance);
    if (this.tokens.all.length === 1) return; // the prompt's own pass brought it
    this.open.push(token.origin);
    if (token.origin === "target") this.steps.push(this.open.splice(0));
  }
  get allSteps() {
    return this.open.length ? [...this.steps, this.open] : this.steps;
  }
  get length() { // tokens of a step
    const count = this.usage?.completion_tokens_details?.num_verify_steps ?? this.allSteps.length;
    return count ? (this.tokens.all.length - 1) / count : null;
  }
  get firstAfter() {
    return this.moments.length ? (this.moments[0][0] - this.asked) / 1e3 : null;
  }
  rate(since = 0) { // tokens a second, of the last `since` milliseconds or of all behind the first
    if (this.moments.length < 2) return null;
    const [end, count] = this.moments.at(-1);
    const [begin, before] = (since && this.moments.find(([at]) => at >= end - since)) || this.moments[0];
    return end > begin ? ((count - before) / (end - begin)) * 1e3 : null;
  }
}

function readChances(given) {
  if (given.content) return given.content.map((one) => [one.logprob, one.top_logprobs.map((top) => [top.token, top.logprob])]);
  return given.token_logprobs.map((one, at) => [one, Object.entries(given.top_logprobs?.[at] ?? {})]);
}

// Streams an answer into `answer`; rejects with what the server said, or where it is gone.
async function stream(body, answer, signal, onChunk) {
  const asked = { model: served.model, stream: true, stream_options: { include_usage: true, include_tokens: true }, ...body };
  const path = body.messages ? "v1/chat/completions" : "v1/completions";
  const reply = await ask(path, { method: "POST", body: JSON.stringify(asked), signal });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let held = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server ended the answer before its end");
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      if (event === "data: [DONE]") return;
      const chunk = JSON.parse(event.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      answer.take(chunk);
    }
    onChunk();
  }
}
