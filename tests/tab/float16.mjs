// Greedy answers to problems, with the weights as they are and with those of the page, which are float16: how many of
// them differ, and how many are right with each.  The option: how many problems.
import { correctAnswer } from "../../docs/tab/rewards.mjs";
import { problems, take } from "../../docs/tab/words.mjs";
import { data, newEngine, options, readFloats, say, tokenizer } from "./node.mjs";

const engine = await newEngine();
const asked = take(problems("validation", 0, data.words, "standard"), Number(options[0]));

function answers(weights) {
  engine.setWeights(readFloats(weights));
  const texts = [];
  for (let i = 0; i < asked.length; i += engine.size.sequences) {
    const batch = asked.slice(i, i + engine.size.sequences);
    const completions = engine.greedy(batch.map(({ question }) => tokenizer.prompt(question)));
    texts.push(...completions.map(({ tokens }) => tokenizer.decode(tokens)));
  }
  return texts;
}

const float32 = answers("weights.f32"), float16 = answers("weights_float16.f32");
const right = (texts) => texts.filter((text, i) => correctAnswer(text, asked[i].answer) === 1).length;
say({
  different: float32.filter((text, i) => text !== float16[i]).length,
  right: { float32: right(float32), float16: right(float16) },
});
