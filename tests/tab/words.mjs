// Problems as the page makes them, and the tokens of each prompt.
import { problems, take } from "../../docs/tab/words.mjs";
import { data, say, tokenizer } from "./node.mjs";

const made = {};
for (const difficulty of ["standard", "hard"]) {
  for (const split of ["train", "validation"]) {
    made[`${difficulty} ${split}`] = take(problems(split, 3, data.words, difficulty), 500);
  }
}
for (const list of Object.values(made)) for (const problem of list) problem.tokens = tokenizer.prompt(problem.question);
say(made);
