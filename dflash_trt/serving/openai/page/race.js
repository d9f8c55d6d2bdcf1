// The same request without drafts and with them, one after the other, replayed side by side.
const CHAT = "A ticket costs $8. How much do 5 tickets cost?";
const TEXT = "jobs: red fox gold, old owl silver";
const lanes = () => [...document.querySelectorAll(".lane")];
let film = null;

function readCourse(speculate, most) {
  const prompt = $("course-prompt").value;
  const asked = served.chats ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  return { ...asked, ...readNumbers("course-"), ...(most && { max_tokens: most }), speculate };
}

function pace(lane, text, share = 0) {
  lane.classList.remove("won");
  lane.querySelector(".pace").textContent = text;
  lane.querySelector(".track div").style.width = `${share * 100}%`;
}

async function race() {
  if (running) return running.abort();
  alarm("");
  film = null;
  $("replay").hidden = true;
  const answers = lanes().map((lane) => new Answer((pace(lane, DASH), lane.querySelector(".text"))));
  answers.forEach((one) => one.place.replaceChildren());
  try {
    $("verdict").textContent = "Warming up …";
    await run([false, true].map((speculate) => [readCourse(speculate, 8), new Answer(make("div"))]));
    $("verdict").textContent = "1 of 2: without drafts …";
    await run([[readCourse(false), answers[0]]]);
    $("verdict").textContent = "2 of 2: with drafts …";
    await run([[readCourse(true), answers[1]]]);
  } catch (error) {
    $("verdict").textContent = "The race did not end.";
    return error.name === "AbortError" || alarm(error.message);
  }
  film = answers;
  $("replay").hidden = false;
  replay();
}

function replay() {
  const mine = (film = [...film]); // an earlier replay sees another film, and ends
  const begun = performance.now();
  const lasts = mine.map(({ moments }) => moments.at(-1)[0] - moments[0][0]);
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  $("verdict").textContent = "Replayed side by side; both clocks start at the first token.";
  const step = () => {
    if (film !== mine) return;
    const at = still || running ? Infinity : performance.now() - begun;
    lanes().forEach((lane, index) => {
      const { moments, tokens: { all } } = mine[index];
      const count = moments.findLast(([moment]) => moment - moments[0][0] <= at)[1];
      all.forEach((one, place) => (one.element.hidden = place >= count));
      pace(lane, `${count} tokens, ${number(Math.min(at, lasts[index]) / 1e3, 2)} s`, count / all.length);
    });
    if (at < Math.max(...lasts)) requestAnimationFrame(step);
    else judge(mine);
  };
  step();
}

function judge(answers) {
  const [plain, drafted] = answers;
  const [ids, others] = answers.map((one) => one.tokens.all.map((token) => token.id));
  const at = [...ids, null].findIndex((one, place) => one !== (others[place] ?? null));
  const outcome = make("b", "", at < 0 ? `identical: ${ids.length} tokens` : `different from token ${at + 1} on`);
  lanes().forEach((lane, index) => pace(lane, `${number(answers[index].rate())} tokens/s`, 1));
  const { accepted_prediction_tokens: kept, rejected_prediction_tokens: lost } = drafted.usage.completion_tokens_details;
  if (kept + lost === 0)
    return $("verdict").replaceChildren("The server drafted nothing; ", outcome);
  if (!plain.rate() || !drafted.rate()) return $("verdict").replaceChildren("Too short to time; ", outcome);
  const ratio = drafted.rate() / plain.rate();
  lanes()[ratio >= 1 ? 1 : 0].classList.add("won");
  const tuned = served.tuned ? `; ${served.tuned} × expected by tune from step times` : "";
  const words = `the tokens per second without drafts on this server${tuned}; acceptance length ${number(drafted.length, 2)}; `;
  $("verdict").replaceChildren(make("strong", "", `${number(ratio, 2)} ×`), words, outcome);
}

function openTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const show = (tab) => {
    document.body.dataset.tab = tab.getAttribute("aria-controls");
    showDetail(null);
    for (const one of tabs) one.setAttribute("aria-selected", one === tab), (one.tabIndex = one === tab ? 0 : -1);
  };
  for (const tab of tabs) {
    tab.onclick = () => show(tab);
    tab.onkeydown = (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const seen = tabs.filter((one) => one.offsetParent);
      const next = by && seen[(seen.indexOf(tab) + by + seen.length) % seen.length];
      if (next) show(next), next.focus();
    };
  }
  show(tabs[0]);
}

// What the server is, once it answers, and whether its model takes chats.
async function begin() {
  const { data } = await (await ask("v1/models")).json();
  const template = JSON.stringify((await (await ask("tokenizer_info")).json()).chat_template ?? "");
  Object.assign(served, { chats: template !== '""', thinks: template.includes("enable_thinking") });
  for (const one of document.querySelectorAll(".chats")) one.hidden = !served.chats;
  $("thinks").parentNode.hidden = !served.thinks;
  $("prompt").placeholder = served.chats ? "Ask something" : "A text to be continued: this model has no chat template";
  $("course-prompt").value ||= served.chats ? CHAT : TEXT;
  $("model").textContent = shown(data[0].id);
  served.model = data[0].id;
}

openTabs();
openChat();
$("course").onsubmit = (event) => (event.preventDefault(), race());
$("replay").onclick = replay;
watch();
