// A run, in a worker: the page stays responsive, and a tab in the background goes on.
//
// Everything that touches the engine stands in one queue: a question that is asked during a step waits for its end.

import { loadEngine } from "./engine.mjs";
import { trainStep } from "./loop.mjs";
import { ownReward } from "./own_reward.mjs";
import { randomNumbers, seedOf } from "./random.mjs";
import { correctAnswer, gradeOf, isEmptyAnswer, REWARDS } from "./rewards.mjs";
import { makeTokenizer } from "./tokenizer.mjs";
import { problems, take } from "./words.mjs";

const VALIDATION_PROBLEMS = 200;
let engine, tokenizer, words, baseWeights;
let run = null; // {settings, step, training, random, reward, validation}
let asked = ""; // the reader's question
let going = false;
let queue = Promise.resolve();

function enqueue(task) {
  queue = queue.then(task).catch((error) => {
    going = false;
    run?.reward.end?.();
    postMessage({ type: "failed", reason: error.reason ?? "error", message: String(error.message ?? error) });
  });
}

onmessage = ({ data: message }) => {
  if (message.type === "stop") going = false; // at once: the step that runs is the last
  else enqueue(() => HANDLERS[message.type](message));
};

const HANDLERS = {
  async load({ wasm, data, weights }) {
    baseWeights = weights;
    words = data.words;
    tokenizer = makeTokenizer(data.tokenizer);
    engine = await loadEngine(wasm, data.config, weights);
    postMessage({ type: "ready", memory: engine.memoryBytes() });
  },

  start({ settings, question, single }) {
    engine.setWeights(baseWeights);
    engine.clearMoments();
    const points = settings.reward === "own" ? null : REWARDS[settings.reward];
    const score = points?.(randomNumbers(seedOf("coin", settings.seed)));
    run?.reward.end?.();
    run = {
      settings,
      step: 0,
      training: problems("train", settings.seed, words, settings.problems),
      random: randomNumbers(seedOf("sampling", settings.seed)),
      reward: score ? async (problem, texts) => texts.map((text) => score(text, problem.answer)) : ownReward(settings.code),
      validation: take(problems("validation", 0, words, settings.problems), VALIDATION_PROBLEMS),
    };
    postMessage({ type: "started" });
    asked = question;
    validate();
    goOn({ single });
  },

  goOn,
  ask({ question }) {
    asked = question;
    answer();
  },
};

function goOn({ single }) { // single: one step, then stop
  run.single = single;
  going = true;
  enqueue(nextStep);
}

async function nextStep() {
  if (!going) return postMessage({ type: "stopped" });
  run.step++;
  const batch = take(run.training, run.settings.promptsPerStep);
  const begun = performance.now();
  const done = await trainStep(run.step, batch, run.settings, engine, tokenizer, run.reward, run.random);
  postMessage({ type: "step", row: summary(done, performance.now() - begun), group: shown(groupToShow(done.groups)) });
  if (run.step <= 10 ? run.step % 2 === 0 : run.step % 5 === 0) validate();
  if (run.step >= run.settings.steps) {
    going = false;
    run.reward.end?.();
    return postMessage({ type: "finished" });
  }
  if (run.single) going = false;
  await new Promise((resolve) => setTimeout(resolve)); // lets messages in
  enqueue(nextStep);
}

function summary({ step, norm, loss, groups }, milliseconds) {
  const rewards = groups.flatMap((group) => group.rewards);
  const graded = groups.flatMap(({ texts, problem }) => texts.map((text) => correctAnswer(text, problem.answer)));
  const empty = groups.flatMap(({ texts }) => texts.map(isEmptyAnswer));
  const equal = groups.filter(({ rewards }) => rewards.every((reward) => reward === rewards[0]));
  const mean = (list) => list.reduce((sum, value) => sum + Number(value), 0) / list.length;
  return {
    step, norm, loss, milliseconds,
    completions: rewards.length,
    reward: mean(rewards),
    right: mean(graded),
    empty: mean(empty),
    equalGroups: equal.length / groups.length,
  };
}

function groupToShow(groups) { // one that teaches something, where there is one
  return groups.find(({ rewards }) => rewards.some((reward) => reward !== rewards[0])) ?? groups[0];
}

/** A group as the page shows it: each token with its probability before and after the update. */
function shown({ problem, prompt, completions, texts, rewards, advantages }) {
  const tokens = completions.map((completion) => completion.tokens);
  const after = engine.perTokenLogps(prompt, tokens, run.settings.temperature);
  return {
    question: problem.question,
    answer: problem.answer,
    completions: completions.map(({ tokens, logps }, i) => ({
      tokens: tokens.map((id, t) => ({ text: tokenizer.piece(id), before: logps[t], after: after[i][t] })),
      reward: rewards[i],
      advantage: advantages[i],
      grade: gradeOf(texts[i], problem.answer),
    })),
  };
}

function accuracy() {
  let right = 0;
  for (let i = 0; i < run.validation.length; i += engine.size.sequences) {
    const batch = run.validation.slice(i, i + engine.size.sequences);
    const completions = engine.greedy(batch.map(({ question }) => tokenizer.prompt(question)));
    completions.forEach(({ tokens }, j) => (right += correctAnswer(tokenizer.decode(tokens), batch[j].answer)));
  }
  return right / run.validation.length;
}

function validate() {
  postMessage({ type: "validation", step: run.step, accuracy: accuracy() });
  answer();
}

/** The likeliest answer to the reader's question, by the model as it was and as it is. */
function answer() {
  const prompt = tokenizer.prompt(asked);
  if (prompt.length > engine.size.maxPrompt) return postMessage({ type: "answers", tooLong: true });
  const now = engine.weights.slice();
  const greedy = () => tokenizer.decode(engine.greedy([prompt])[0].tokens);
  const after = greedy();
  engine.setWeights(baseWeights);
  const before = greedy();
  engine.setWeights(now);
  postMessage({ type: "answers", before, after });
}
