// A run in Node: accuracy on the page's validation problems, share of empty answers, seconds of processor time.
// Options as key=value: seed, reward (a name in rewards.mjs), difficulty, validate (every so many steps), and SETTINGS.
import { trainStep, SETTINGS } from "../../docs/tab/loop.mjs";
import { randomNumbers, seedOf } from "../../docs/tab/random.mjs";
import { correctAnswer, isEmptyAnswer, REWARDS } from "../../docs/tab/rewards.mjs";
import { problems, take } from "../../docs/tab/words.mjs";
import { data, newEngine, options, say, tokenizer } from "./node.mjs";

const asked = Object.fromEntries(options.map((option) => option.split("=")));
const seed = Number(asked.seed ?? 0), every = Number(asked.validate ?? 10);
const difficulty = asked.difficulty ?? "standard";
const settings = Object.fromEntries(
  Object.entries(SETTINGS).map(([name, value]) => [name, name in asked ? JSON.parse(asked[name]) : value]),
);

const engine = await newEngine();
const validation = take(problems("validation", 0, data.words, difficulty), 200);
const training = problems("train", seed, data.words, difficulty);
const random = randomNumbers(seedOf("sampling", seed));
const points = REWARDS[asked.reward ?? "course"](randomNumbers(seedOf("coin", seed)));
const reward = async (problem, texts) => texts.map((text) => points(text, problem.answer));

function accuracy() {
  let right = 0;
  for (let i = 0; i < validation.length; i += engine.size.sequences) {
    const batch = validation.slice(i, i + engine.size.sequences);
    const completions = engine.greedy(batch.map(({ question }) => tokenizer.prompt(question)));
    completions.forEach(({ tokens }, j) => (right += correctAnswer(tokenizer.decode(tokens), batch[j].answer)));
  }
  return right / validation.length;
}

const seconds = () => process.cpuUsage().user / 1e6;
const begun = seconds();
const rows = [{ step: 0, accuracy: accuracy() }];
for (let step = 1; step <= settings.steps; step++) {
  const before = seconds();
  const batch = take(training, settings.promptsPerStep);
  const { groups, norm, loss } = await trainStep(step, batch, settings, engine, tokenizer, reward, random);
  const texts = groups.flatMap((group) => group.texts), rewards = groups.flatMap((group) => group.rewards);
  const row = { step, norm, loss, seconds: seconds() - before };
  row.reward = rewards.reduce((sum, value) => sum + value, 0) / rewards.length;
  row.empty = texts.filter(isEmptyAnswer).length / texts.length;
  if (step % every === 0) row.accuracy = accuracy();
  rows.push(row);
  console.error(JSON.stringify(row));
}
say({ rows, seconds: seconds() - begun, memory: engine.memoryBytes() });
