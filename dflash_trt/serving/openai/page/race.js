// The same request without drafts and with them, one after the other, replayed side by side.
const PROMPT = {
  chat: "A farmer sells 12 melons at $3 each and 9 pumpkins at $5 each. How much does he earn?",
  text: "jobs: red fox gold, old owl silver",
};
const lanes = () => [...document.querySelectorAll(".lane")];
let film = null;

function readCourse(speculate) {
  const prompt = $("course-prompt").value;
  return {
    speculate,
    temperature: Number($("course-temperature").value),
    seed: Number($("course-seed").value),
    max_tokens: Number($("course-most").value),
    ...(served.chats ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
  };
}

async function race() {
  if (running) return running.abort();
  alarm("");
  film = null;
  $("replay").hidden = true;
  for (const lane of lanes()) {
    lane.classList.remove("won");
    lane.querySelector(".text").replaceChildren();
    lane.querySelector(".pace").textContent = DASH;
    lane.querySelector(".track div").style.width = "0";
  }
  const [plain, drafted] = lanes().map((lane) => new Answer(lane.querySelector(".text")));
  const warm = [false, true].map((speculate) => [{ ...readCourse(speculate), max_tokens: 8 }, new Answer(make("div"))]);
  try {
    $("verdict").textContent = "Warming up …";
    await run(warm);
    $("verdict").textContent = "1 of 2: without drafts …";
    await run([[readCourse(false), plain]]);
    $("verdict").textContent = "2 of 2: with drafts …";
    await run([[readCourse(true), drafted]]);
  } catch (error) {
    $("verdict").textContent = error.name === "AbortError" ? "Stopped." : "The race did not end.";
    if (error.name !== "AbortError") alarm(error.message);
    return;
  }
  film = [plain, drafted];
  $("replay").hidden = false;
  replay();
}

function replay() {
  const mine = film;
  const begun = performance.now();
  const lasts = mine.map((one) => one.moments.at(-1)[0] - one.moments[0][0]);
  const isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
  lanes().forEach((lane) => lane.classList.remove("won"));
  $("verdict").textContent = "Replayed side by side; both clocks start at the first token.";
  const step = () => {
    if (film !== mine || running) return;
    const at = isStill ? Infinity : performance.now() - begun;
    lanes().forEach((lane, index) => {
      const { moments, tokens } = mine[index];
      const count = moments.findLast(([moment]) => moment - moments[0][0] <= at)[1];
      for (const [place, one] of tokens.all.entries()) one.element.hidden = place >= count;
      const spent = Math.min(at, lasts[index]) / 1e3;
      lane.querySelector(".pace").textContent = `${count} tokens, ${number(spent, 2)} s`;
      lane.querySelector(".track div").style.width = `${(count / tokens.all.length) * 100}%`;
    });
    if (at < Math.max(...lasts)) requestAnimationFrame(step);
    else judge(mine);
  };
  step();
}

function judge([plain, drafted]) {
  const ids = [plain, drafted].map((one) => one.tokens.all.map((token) => token.id));
  const ratio = drafted.rate() / plain.rate();
  const at = ids[0].findIndex((one, place) => one !== ids[1][place]);
  const same = at < 0 && ids[0].length === ids[1].length;
  lanes().forEach((lane, index) => {
    const one = [plain, drafted][index];
    lane.querySelector(".pace").textContent = `${number(one.rate())} tokens/s`;
  });
  const outcome = same ? `identical: ${ids[0].length} tokens` : `different from token ${(at < 0 ? Math.min(...ids.map((one) => one.length)) : at) + 1} on`;
  const { accepted_prediction_tokens: kept, rejected_prediction_tokens: lost } = drafted.usage.completion_tokens_details;
  if (kept + lost === 0)
    return $("verdict").replaceChildren("The server drafted nothing: where drafts cost more than they bring, it leaves them out; ", make("b", "", outcome));
  lanes()[ratio >= 1 ? 1 : 0].classList.add("won");
  const tuned = served.tuned ? `; ${number(Number(served.tuned), 2)} × against target_only, as tune measured it` : "";
  $("verdict").replaceChildren(
    make("strong", "", `${number(ratio, 2)} ×`),
    `the tokens per second without drafts on this server${tuned}; acceptance length ${number(drafted.length, 2)}; `,
    make("b", "", outcome),
  );
}

function openTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const show = (tab) => {
    document.body.dataset.tab = tab.getAttribute("aria-controls");
    for (const one of tabs) {
      one.setAttribute("aria-selected", one === tab);
      one.tabIndex = one === tab ? 0 : -1;
    }
  };
  tabs.forEach((tab, at) => {
    tab.addEventListener("click", () => show(tab));
    tab.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const seen = tabs.filter((one) => one.offsetParent);
      const next = by && seen[(seen.indexOf(tabs[at]) + by + seen.length) % seen.length];
      if (next) show(next), next.focus();
    });
  });
  show(tabs[0]);
}

// What the server is, once it answers, and whether its model takes chats.
async function begin() {
  const { data } = await (await ask("v1/models")).json();
  const template = JSON.stringify((await (await ask("tokenizer_info")).json()).chat_template ?? "");
  served.chats = template !== '""';
  served.thinks = template.includes("enable_thinking");
  served.model = data[0].id;
  $("model").textContent = shown(served.model);
  for (const one of document.querySelectorAll(".chats")) one.hidden = !served.chats;
  $("thinks").parentNode.hidden = !served.thinks;
  $("prompt").placeholder = served.chats ? "Ask something" : "A text to be continued: this model has no chat template";
  $("course-prompt").value ||= served.chats ? PROMPT.chat : PROMPT.text;
}

openTabs();
openChat();
$("course").addEventListener("submit", (event) => (event.preventDefault(), race()));
$("replay").addEventListener("click", replay);
watch();
