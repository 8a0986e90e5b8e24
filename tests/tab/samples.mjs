// Writes samples.json: completions of the tiny model, [{text, gold}], many of them garbled.  The option: how many.
import fs from "node:fs";
import path from "node:path";

import { randomNumbers } from "../../docs/tab/random.mjs";
import { problems } from "../../docs/tab/words.mjs";
import { data, folder, newEngine, options, say, tokenizer } from "./node.mjs";

const wanted = Number(options[0]), seed = Number(options[1]);
const engine = await newEngine();
const random = randomNumbers(seed);
const sources = ["standard", "hard"].map((difficulty) => problems("train", seed, data.words, difficulty));
const samples = [];
for (let i = 0; samples.length < wanted; i++) {
  const { question, answer } = sources[i % 2].next().value;
  const temperature = [1, 1.4, 1.8][i % 3];
  for (const { tokens } of engine.sample(tokenizer.prompt(question), engine.size.sequences, temperature, random)) {
    samples.push({ text: tokenizer.decode(tokens), gold: answer });
  }
}
fs.writeFileSync(path.join(folder, "samples.json"), JSON.stringify(samples.slice(0, wanted)));
say(samples.length);
