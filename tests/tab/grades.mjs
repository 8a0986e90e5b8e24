// What the page's graders say of texts: reads [{text, gold}] from FILE, the option, and says the points of each.
import { extractAnswer } from "../../docs/tab/answers.mjs";
import { correctAnswer, formReward, tidyFormat, tutorialsReward } from "../../docs/tab/rewards.mjs";
import { options, readJson, say } from "./node.mjs";

say(
  readJson(options[0]).map(({ text, gold }) => ({
    answer: extractAnswer(text),
    correct_answer: correctAnswer(text, gold),
    tidy_format: tidyFormat(text),
    tutorials: tutorialsReward(text, gold),
    form: formReward(text),
  })),
);
