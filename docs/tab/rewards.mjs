// The rewards of grpo_lib.rewards.  Each takes a completion's text and the gold number, and returns points.

import { answerBlock, extractAnswer, formatIsExact, formatIsLoose, isNear, TAGS } from "./answers.mjs";

export function count(text, part) {
  return text.split(part).length - 1;
}

/** 1 for the one tagged answer that equals the gold. */
export function correctAnswer(completion, gold) {
  if (count(completion, "<answer>") > 1 || count(completion, "</answer>") > 1) return 0;
  const at = completion.indexOf("<answer>");
  const inside = at >= 0 && completion.slice(0, at).includes("<reasoning>");
  if (inside && completion.slice(at).includes("</reasoning>")) return 0; // an answer within the reasoning
  return extractAnswer(completion) === gold ? 1 : 0;
}

/** How the page grades a completion: "right", "untagged" (the right number in no answer tags), or "wrong". */
export function gradeOf(completion, gold) {
  if (correctAnswer(completion, gold) === 1) return "right";
  const last = completion.match(/\d+/g)?.at(-1);
  return answerBlock(completion) === null && last === gold ? "untagged" : "wrong";
}

/** 0.1 for exactly the template with a number as its answer. */
export function tidyFormat(completion) {
  return formatIsExact(completion) && extractAnswer(completion) !== null ? 0.1 : 0;
}

export function courseReward(completion, gold) {
  return correctAnswer(completion, gold) + tidyFormat(completion);
}

/** The field's tutorials: up to 9.5, of which `<answer>?</answer>` in perfect tags earns 5.  That is its hole. */
export function tutorialsReward(completion, gold) {
  let points = formatIsExact(completion) ? 3 : formatIsLoose(completion) ? 1.5 : 0;
  for (const tag of TAGS) points += count(completion, tag) === 1 ? 0.5 : -0.5;
  const answer = extractAnswer(completion);
  if (answer === null) return points; // there is nothing to check: 0, where a wrong number costs 1
  if (answer === gold) return points + 3 + 1.5;
  if (isNear(answer, gold, 0.1)) return points + 0.5;
  if (isNear(answer, gold, 0.2)) return points + 0.25;
  return points - 1;
}

/** Tidy form alone, right or wrong. */
export function formReward(completion) {
  return formatIsExact(completion) ? 1 : 0;
}

/** Whether a completion is the empty answer that the tutorials' reward pays. */
export function isEmptyAnswer(completion) {
  return formatIsExact(completion) && extractAnswer(completion) === null;
}

/** By name; each takes a source of random numbers, which only the coin needs. */
export const REWARDS = {
  course: () => courseReward,
  tutorials: () => tutorialsReward,
  form: () => formReward,
  coin: (random) => () => (random() < 0.5 ? 1 : 0),
};
