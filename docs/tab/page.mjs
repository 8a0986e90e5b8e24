// The page: controls, curves, one group, a question, experiments.  It computes nothing; worker.mjs does.

import { drawChart, roundTicks } from "./chart.mjs";
import { EXAMPLES, EXPERIMENTS } from "./experiments.mjs";
import { advantageReading, lossReading, moveReading, normReading, pushReading, VISIBLE } from "./readings.mjs";
import { RECORDED } from "./recorded.mjs";
import { CHOICES, collapses, courseSettings, differences, fromLink, toLink, validSeed } from "./settings.mjs";
import { draw, splitOf } from "./words.mjs";

const $ = (id) => document.getElementById(id);
const { data, texts, course } = JSON.parse($("data").textContent);
const FIRST_QUESTION = "Mia buys 9 eggs a day for 3 days. Later Tom brings 5 more. How many eggs does Mia have now?";
const PREDICTIONS = 3;
const READY = "ready", RUNNING = "running", STOPPING = "stopping", STOPPED = "stopped", FINISHED = "finished";

let language = "en";
let state = "loading";
let worker = null;
let settings = courseSettings(); // of the run that is shown
let run = null, earlier = null; // {settings, rows, validations}
let group = null, newest = null; // the group that is shown, with its step; that of the last step, where another is held
let chosen = null, drawn = {}; // the completion that is explained; of which group, in which language, the table is
const finished = []; // runs that came to their end
let experiment = null; // {name, right, holds, guess, problems} of the run, if it is one
let waiting = null; // a button that lost the focus because it was disabled
let notice = null, reply = null;
let megabytes = 0; // of the engine
let begun = 0, started = 0; // runs; what still comes from an earlier one is not shown in the next

// --- Texts ---

function text(key, values = {}) {
  const said = texts[key][language] ?? texts[key].en;
  return said.replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

const percent = (share) => `${Math.round(100 * share)} %`;
const signed = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)}`;

function optionText(name, value) {
  const key = `${name}_${value}`;
  return key in texts ? text(key) : String(value);
}

function translate() {
  document.documentElement.lang = language === "zh_TW" ? "zh-Hant-TW" : language;
  document.title = text("title");
  for (const element of document.querySelectorAll("[data-text]")) element.textContent = text(element.dataset.text);
  $("course").hidden = !course; // where the page is by itself, it has none to lead to
  if (course) $("course").href = course[language];
  for (const element of document.querySelectorAll("[data-tip]")) element.replaceChildren(...tip(element.dataset.tip));
  makeExamples();
  makeLoop();
  makeOptions($("prediction"), "prediction", [0, 1, 2].map((i) => text(`predict${i}`)));
  makeControls();
  makeExperiments();
  controlsChanged();
  show();
}

// --- Elements ---

function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

function makeOptions(box, name, labels) {
  const before = [...box.querySelectorAll("input")].findIndex((input) => input.checked);
  const options = labels.map((label, i) => {
    const input = make("input", { type: "radio", name, value: String(i), checked: i === before });
    return make("label", {}, input, make("span", {}, label));
  });
  box.replaceChildren(...options);
}

/** A question mark that explains a word when the pointer or the keyboard is on it: a button, and what it says. */
function tip(word) {
  const said = make("span", { id: `tip-${word}`, className: "tip-text" }, text(`tip_${word}`));
  said.setAttribute("role", "tooltip");
  const button = make("button", { type: "button", className: "tip" }, "?");
  button.setAttribute("aria-label", `${text("tip")}: ${text(word)}`);
  button.setAttribute("aria-describedby", said.id);
  button.addEventListener("keydown", (event) => event.key === "Escape" && button.blur());
  return [button, said];
}

function makeExamples() {
  const rows = EXAMPLES.map(({ answer, points }, i) => {
    const end = make("span", { className: "mark" }, "<|im_end|>");
    return make("tr", {}, make("td", {}, answer, end), make("td", {}, String(points)), make("td", {}, text(`example${i}`)));
  });
  $("examples").replaceChildren(...rows);
}

function makeLoop() {
  const items = [0, 1, 2, 3, 4].map((i) => {
    const title = make("b", {}, text(`loop${i}`), ...(i === 4 ? tip("norm") : []));
    return make("li", { className: "tipped" }, title, make("span", { id: `loop-${i}` }));
  });
  $("loop").replaceChildren(...items);
}

function makeControls() {
  const shown = readControls();
  const labels = Object.entries(CHOICES).map(([name, values]) => {
    const options = [...values].sort((a, b) => (typeof a === "number" ? a - b : 0)).map((value) =>
      make("option", { value: String(value), selected: value === shown[name] }, optionText(name, value)),
    );
    const label = make("label", { htmlFor: name }, text(name));
    const control = make("div", { className: "control tipped" }, label, ...tip(name), make("select", { id: name }, ...options));
    if (name === "reward") control.append(make("small", { id: "reward-help" }));
    return control;
  });
  $("choices").replaceChildren(...labels);
}

function readControls() {
  const read = { ...settings, steps: courseSettings().steps }; // an experiment may have had fewer
  for (const [name, values] of Object.entries(CHOICES)) {
    if ($(name)) read[name] = values.find((value) => String(value) === $(name).value);
  }
  if ($("choices").children.length) Object.assign(read, { seed: validSeed($("seed").value), code: $("code").value });
  return read;
}

function writeControls(from) {
  for (const name of Object.keys(CHOICES)) $(name).value = String(from[name]);
  $("seed").value = from.seed;
  $("code").value = from.code;
  controlsChanged();
}

function controlsChanged() {
  $("reward-help").textContent = text(`rewardHelp_${$("reward").value}`);
  $("own").hidden = $("reward").value !== "own";
  $("changed").hidden = !run || differences(readControls(), run.settings).length === 0;
  const link = toLink(readControls(), language);
  try {
    history.replaceState(null, "", `#${link}`);
  } catch { // some browsers refuse it to a page that is a file
    location.hash = link;
  }
}

// --- The run ---

function begin(asked, ofExperiment = null, single = false) {
  begun++;
  if (ofExperiment) earlier = referenceOf(asked);
  else if (run?.validations.length > 1) earlier = run; // it has a curve
  experiment = ofExperiment;
  settings = asked;
  run = { settings: asked, rows: [], validations: [] };
  group = newest = chosen = notice = null;
  state = RUNNING;
  $("hold").checked = false;
  $("example").open = false;
  controlsChanged();
  worker.postMessage({ type: "start", settings: asked, question: $("question").value, single });
  show();
}

function pressTrain() {
  if (state === RUNNING) {
    state = STOPPING;
    worker.postMessage({ type: "stop" });
  } else if (state === STOPPED) {
    resume();
  } else {
    begin(readControls());
  }
  show();
}

function pressOne() {
  if (state === STOPPED) resume(true);
  else begin(readControls(), null, true);
  show();
}

function resume(single = false) {
  state = RUNNING;
  release();
  worker.postMessage({ type: "goOn", single });
}

function release() { // the group that is held
  $("hold").checked = false;
  if (group !== newest) [group, chosen] = [newest, null];
}

const RECEIVED = {
  ready({ memory }) {
    state = READY;
    megabytes = Math.round(memory / 1e6);
  },
  started() {},
  step({ row, group: shown }) {
    run.rows.push(row);
    newest = { ...shown, step: row.step };
    if (!$("hold").checked) [group, chosen] = [newest, null];
  },
  validation: ({ step, accuracy }) => run.validations.push([step, accuracy]),
  answers: (message) => (reply = message),
  stopped: () => (state = STOPPED),
  finished() {
    state = FINISHED;
    finished.push(run);
  },
  failed({ reason, message }) {
    state = run?.rows.length || run ? FINISHED : "broken";
    notice = { key: reason === "error" ? "failed" : reason, values: { message } };
  },
};

function receive({ data: message }) {
  if (message.type === "started") started++;
  if (started < begun && ["step", "validation", "stopped", "finished"].includes(message.type)) return;
  RECEIVED[message.type](message);
  show();
  if (message.type === "finished" && experiment) reveal($("verdict"));
}

// --- What is shown ---

function show() {
  showState();
  showCurves();
  showLoop();
  showGroup();
  showAnswers();
  showPrediction();
  showVerdict();
}

function showState() {
  const labels = { [RUNNING]: "stop", [STOPPING]: "stop", [STOPPED]: "goOn", [FINISHED]: "train" };
  $("train").textContent = text(labels[state] ?? "train");
  enable($("train"), !["loading", "broken", STOPPING].includes(state));
  enable($("one"), !["loading", "broken", RUNNING, STOPPING].includes(state));
  enable($("again"), run && state !== "broken");
  const row = run?.rows.at(-1);
  const values = row && { step: row.step, steps: run.settings.steps, seconds: (row.milliseconds / 1000).toFixed(1) };
  const keys = { loading: "loading", ready: "readyText", broken: "broken", finished: "noStep" };
  $("status").textContent = row ? text(state === FINISHED ? "finishedText" : "stepText", values) : text(keys[state] ?? "startingText");
  $("figures").textContent = row ? text("figures", { ...values, megabytes }) : "";
  const doomed = run && (experiment?.collapses || collapses(run.settings)) ? { key: "meantToCollapse", values: {} } : null;
  const said = notice ?? doomed;
  $("notice").hidden = !said;
  if (said) $("notice").textContent = text(said.key, said.values);
}

/** A button that is disabled while it has the focus gets the focus back with its use. */
function enable(button, usable) {
  if (!usable && document.activeElement === button) waiting = button;
  button.disabled = !usable;
  if (!usable || button !== waiting) return;
  if (document.activeElement === document.body) button.focus({ preventScroll: true });
  waiting = null;
}

function showCurves() {
  const steps = Math.max(run?.settings.steps ?? 50, experiment ? 0 : (earlier?.rows.length ?? 0));
  const validations = (one) => one?.validations.filter(([step]) => step <= steps) ?? [];
  const rewards = (one) => (comparable(one) ? one.rows.map((row) => [row.step, row.reward]).slice(0, steps) : []);
  const lines = (of) => [{ className: "old", points: of(earlier) }, { className: "new", points: of(run) }];
  drawChart($("accuracy"), lines(validations), { steps, ticks: [0, 0.25, 0.5, 0.75, 1], label: percent });
  const ticks = roundTicks([...rewards(earlier), ...rewards(run)].map(([, value]) => value));
  drawChart($("rewards"), lines(rewards), { steps, ticks, label: (value) => String(Number(value.toFixed(2))) });
  showLegend();
  const [first, last] = [run?.validations[0], run?.validations.at(-1)];
  const values = last && { first: percent(first[1]), last: percent(last[1]), step: last[0] };
  const reading = last && text(last[0] > 0 ? "accuracyReading" : "startedAt", values);
  $("reading").textContent = reading ?? "";
  $("accuracy").setAttribute("aria-label", reading ?? text("accuracyTitle"));
  const row = run?.rows.at(-1);
  const reward = row && text("rewardReading", { first: run.rows[0].reward.toFixed(2), last: row.reward.toFixed(2) });
  $("rewards").setAttribute("aria-label", reward || text("rewardTitle"));
}

function comparable(one) { // its rewards count the same points as those of the run
  return one && !differences(one.settings, run.settings).some((name) => ["reward", "code"].includes(name));
}

function showLegend() {
  const named = (one, other) => {
    const special = differences(one.settings, courseSettings());
    const between = other ? differences(one.settings, other.settings) : [];
    const differing = between.length ? between : special;
    const names = differing.filter((name) => name !== "code" || !differing.includes("reward")); // “your own” says it
    if (experiment && one === run) return text(experiment.name);
    if (!special.length) return text("courseSettings");
    return names.map((name) => (name === "code" ? text("own") : `${text(name)}: ${optionText(name, one.settings[name])}`)).join(", ");
  };
  const items = [];
  if (run) items.push(make("li", {}, text("thisRun", { settings: named(run, earlier) })));
  const reference = experiment && text(earlier.recorded ? "recordedRun" : "yourRun", { reference: referenceText() });
  if (earlier) items.push(make("li", { className: "old" }, reference ?? text("earlierRun", { settings: named(earlier, run) })));
  if (earlier && !comparable(earlier)) items.push(make("li", { className: "note" }, text("otherPoints")));
  $("legend").replaceChildren(...items);
}

function showLoop() {
  const row = run?.rows.at(-1), advantage = run?.settings.advantage;
  const figures = row && [
    text("loop0Figure", { n: row.completions }),
    text("loop1Figure", { reward: row.reward.toFixed(2), right: percent(row.right) }),
    text(advantageReading(advantage), { share: percent(row.equalGroups) }),
    text(lossReading(row, advantage), { loss: Math.abs(row.loss) < 5e-4 ? "0.000" : row.loss.toFixed(3).replace("-", "−") }),
    text(normReading(row), { norm: row.norm.toFixed(2) }),
  ];
  for (let i = 0; i < 5; i++) $(`loop-${i}`).textContent = figures?.[i] ?? text(`loop${i}Help`);
  $("two-shares").textContent = row ? text("twoShares", { temperature: run.settings.temperature }) : "";
}

function showGroup() {
  $("group").hidden = !group;
  $("group-none").hidden = Boolean(group);
  const held = group !== newest;
  $("held").hidden = !held;
  $("group-section").classList.toggle("held", held);
  $("group-title").textContent = group ? text("groupTitle", { step: group.step }) : text("groupTitleNone");
  if (!group) return;
  if (held) $("held").textContent = text("held", { held: group.step, step: newest.step });
  if (drawn.group === group && drawn.language === language) return showChosen(); // whoever is in the table stays there
  drawn = { group, language };
  $("group-question").textContent = text("groupQuestion", { question: group.question, answer: group.answer });
  const focused = [...$("rows").children].findIndex((row) => row.contains(document.activeElement));
  $("rows").replaceChildren(...group.completions.map(rowOf));
  $("rows").children[focused]?.querySelector("button").focus({ preventScroll: true }); // the keyboard stays where it was
  showChosen();
}

function rowOf(completion, i) {
  const tokens = completion.tokens.map((token) => {
    const change = token.after - token.before;
    const strength = Math.min(0.75, Math.abs(change) * 2).toFixed(2);
    const title = text("tokenTitle", { before: (100 * Math.exp(token.before)).toFixed(1), after: (100 * Math.exp(token.after)).toFixed(1) });
    const span = make("span", { className: "token", title }, token.text);
    span.style.background = `rgb(var(${change > 0 ? "--up" : "--down"}) / ${strength})`;
    return span;
  });
  const verdict = make("span", { className: "verdict" }, text(completion.grade));
  const why = make("button", { type: "button", onclick: () => explain(i) }, signed(completion.advantage));
  why.setAttribute("aria-label", text("whyLabel", { advantage: signed(completion.advantage) }));
  const pale = completion.tokens.every((token) => Math.abs(token.after - token.before) < VISIBLE);
  const likelier = [timesOf(completion), ...(pale ? [make("small", {}, text("pale"))] : [])];
  const cells = [[...tokens, verdict], [completion.reward.toFixed(2)], [why], likelier];
  const labels = ["completion", "rewardColumn", "advantageColumn", "likelierColumn"];
  return make("tr", {}, ...cells.map((content, column) => {
    const cell = make("td", {}, ...content);
    cell.dataset.label = text(labels[column]);
    return cell;
  }));
}

function changeOf({ tokens }) { // of the log-probability of the whole answer
  return tokens.reduce((sum, token) => sum + token.after - token.before, 0);
}

function timesOf(completion) {
  const times = Math.exp(changeOf(completion));
  return `×\u00a0${times < 0.01 ? times.toExponential(0) : times.toFixed(2)}`;
}

function explain(i) {
  chosen = i;
  if (state === RUNNING) $("hold").checked = true; // or the next step would take it away
  showChosen();
}

function showChosen() {
  [...$("rows").children].forEach((row, i) => row.classList.toggle("chosen", i === chosen));
  $("why").textContent = chosen === null ? "" : explanation(chosen);
}

function explanation(i) {
  const rewards = group.completions.map((completion) => completion.reward);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const std = Math.sqrt(rewards.reduce((sum, reward) => sum + (reward - mean) ** 2, 0) / (rewards.length - 1));
  const [reward, advantage] = [rewards[i].toFixed(2), signed(group.completions[i].advantage)];
  const kind = std < 1e-9 && run.settings.advantage !== "none" ? "equal" : run.settings.advantage;
  const how = text(`why_${kind}`, { reward, advantage, mean: mean.toFixed(2), std: std.toFixed(2) });
  return `${how} ${movement(group.completions[i])}`;
}

function movement(completion) { // where its advantage pushes it, and where it went
  const times = timesOf(completion).slice(2);
  const n = run.settings.promptsPerStep * run.settings.groupSize;
  const moved = text(moveReading(completion.advantage, changeOf(completion)), { times, n });
  return `${text(pushReading(completion.advantage))} ${moved}`;
}

function showAnswers() {
  if (!reply) return;
  $("answer-before").textContent = reply.tooLong ? text("tooLong") : reply.before;
  $("answer-now").textContent = reply.tooLong ? "" : reply.after;
}

// --- Experiments ---

function makeExperiments() {
  const cards = EXPERIMENTS.map(({ name }) => {
    const choices = make("div", { className: "options" });
    const old = $(`guess-${name}`);
    choices.id = `guess-${name}`;
    const labels = Array.from({ length: PREDICTIONS }, (_, i) => text(`${name}${i}`));
    if (old) choices.append(...old.childNodes);
    makeOptions(choices, `guess-${name}`, labels);
    const fieldset = make("fieldset", {}, make("legend", {}, text(`${name}Ask`)), choices);
    const button = make("button", { type: "button", id: `run-${name}`, onclick: () => runExperiment(name) }, text("runIt"));
    button.setAttribute("aria-label", `${text("runIt")}: ${text(name)}`);
    button.disabled = guessOf(choices) < 0;
    choices.addEventListener("change", () => (button.disabled = ["loading", "broken"].includes(state)));
    return make("div", {}, make("h3", {}, text(name)), fieldset, button);
  });
  $("experiments").replaceChildren(...cards);
}

function guessOf(box) {
  return [...box.querySelectorAll("input")].findIndex((input) => input.checked);
}

function runExperiment(name) {
  const one = EXPERIMENTS.find((other) => other.name === name);
  const asked = { ...courseSettings(), ...one.changes, seed: validSeed($("seed").value) };
  writeControls(asked);
  begin(asked, { ...one, guess: guessOf($(`guess-${name}`)) });
  $("train").focus({ preventScroll: true }); // the next key stops this run
  reveal($("verdict"));
}

function reveal(element) {
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  element.scrollIntoView({ block: "start", behavior: calm ? "auto" : "smooth" });
}

/** The run that an experiment is compared with: the reader's own with the same seed, or else the recorded one. */
function referenceOf({ problems, seed }) {
  const settings = { ...courseSettings(), problems };
  const own = finished.findLast((one) => differences(one.settings, { ...settings, seed }).length === 0);
  if (own) return own;
  const { accuracies, rewards } = RECORDED[problems];
  const rows = rewards.map((reward, i) => ({ step: i + 1, reward }));
  return { settings, rows, validations: accuracies, recorded: true };
}

function referenceText() {
  return text(`reference_${earlier.settings.problems}`);
}

function showPrediction() { // it is of the default settings, and of no other run
  const standard = { ...courseSettings(), seed: run?.settings.seed };
  const other = run && (experiment || differences(run.settings, standard).length > 0);
  $("predict").hidden = Boolean(other);
  const guess = guessOf($("prediction"));
  if (other || state !== FINISHED || notice || guess < 0) return;
  $("status").textContent += ` ${text("youSaid", { prediction: text(`predict${guess}`), last: percent(run.validations.at(-1)[1]) })}`;
}

function showVerdict() {
  $("verdict").hidden = !experiment;
  if (!experiment) return;
  const { name, guess } = experiment;
  const parts = [make("h3", {}, text(name)), make("p", {}, text("youPredicted", { prediction: text(`${name}${guess}`) }))];
  if (state === FINISHED && !notice) parts.push(...outcome());
  else parts.push(make("p", {}, text("experimentRuns")));
  const words = (elements) => [...elements].map((element) => element.textContent).join();
  if (words(parts) !== words($("verdict").children)) $("verdict").replaceChildren(...parts); // said once, not at each step
}

function outcome() { // of an experiment that has ended
  const { name, right, holds, guess } = experiment;
  const [first, [step, last]] = [run.validations[0][1], run.validations.at(-1)];
  const [at, after] = earlier.validations.findLast(([one]) => one <= step);
  const usual = holds({ first, last, reference: after });
  const verdict = text(!usual ? "otherwise" : guess === right ? "asYouSaid" : "notAsYouSaid");
  const before = percent(earlier.validations[0][1]), reference = referenceText();
  const values = { first: percent(first), last: percent(last), step, reference, before, after: percent(after), at };
  return [
    make("p", {}, `${verdict} ${text(`${name}Outcome`)}`),
    make("p", {}, text("compared", values)),
    make("p", { className: "hint" }, text(`${name}Section`)),
  ];
}

// --- The start ---

function bytesOf(id) {
  return Uint8Array.from(atob($(id).textContent), (character) => character.charCodeAt(0));
}

/** float16 as it lies in memory, to float32. */
function fromFloat16(halves) {
  return Float32Array.from(halves, (bits) => {
    const exponent = (bits >> 10) & 31, fraction = bits & 1023;
    const size = exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -24 * fraction;
    return bits & 0x8000 ? -size : size;
  });
}

function missing(wasm) { // what this browser lacks
  if (typeof WebAssembly === "undefined" || typeof Worker === "undefined") return "noWebAssembly";
  return WebAssembly.validate(wasm) ? null : "noSimd";
}

function otherQuestion() {
  for (;;) {
    const { question } = draw(Math.random, data.words, readControls().problems);
    if (splitOf(question, data.words) === "validation") return question;
  }
}

function ask() {
  worker?.postMessage({ type: "ask", question: $("question").value });
}

function listen() {
  $("language").addEventListener("change", () => {
    language = $("language").value;
    translate();
  });
  $("train").addEventListener("click", pressTrain);
  $("one").addEventListener("click", pressOne);
  $("hold").addEventListener("change", () => {
    if (!$("hold").checked) release();
    show();
  });
  $("again").addEventListener("click", () => begin(readControls()));
  $("controls").addEventListener("input", controlsChanged);
  addEventListener("hashchange", () => writeControls(fromLink(location.hash.slice(1))));
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  $("link").addEventListener("click", async () => {
    await navigator.clipboard?.writeText(location.href).catch(() => {});
    $("copied").textContent = text("copied");
  });
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  $("other").addEventListener("click", () => {
    $("question").value = otherQuestion();
    ask();
  });
}

function open() {
  const fragment = location.hash.slice(1);
  const asked = new URLSearchParams(fragment).get("lang") ?? navigator.language;
  language = /^zh/i.test(asked) ? "zh_TW" : "en";
  settings = fromLink(fragment);
  $("language").value = language;
  $("question").value = FIRST_QUESTION;
  translate();
  writeControls(settings);
  listen();
  const wasm = bytesOf("engine");
  const lacks = missing(wasm);
  if (lacks) {
    state = "broken";
    notice = { key: lacks, values: {} };
    return show();
  }
  const script = new Blob([$("worker").textContent], { type: "text/javascript" });
  worker = new Worker(URL.createObjectURL(script));
  worker.onmessage = receive;
  worker.onerror = (event) => receive({ data: { type: "failed", reason: "error", message: event.message } });
  worker.postMessage({ type: "load", wasm, data, weights: fromFloat16(new Uint16Array(bytesOf("weights").buffer)) });
}

open();
