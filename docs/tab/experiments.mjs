// Five guided experiments.  Of each: what it changes of the default settings, which of its three predictions comes true,
// whether it is known to end worse than it began, and whether a run went as its outcome says: of the accuracies first,
// last, and that of the reference run, which has the default reward on the same problems.  Its words are in texts.json:
// NAME, NAMEAsk, NAME0 to NAME2, NAMEOutcome, NAMESection.

/** Answers to one question (its right number: 2), and what the default reward gives for them; explained in texts.json. */
export const EXAMPLES = [
  { answer: "<reasoning>3+7=10 10-8=2</reasoning><answer>2</answer>", points: 1.1 },
  { answer: "<reasoning>3+7=10 10-8=12</reasoning><answer>12</answer>", points: 0.1 },
  { answer: "3+7=10 10-8=2\n#### 2", points: 0 },
];

const POINT_FOR_ALL = `// A point for every answer, and one more for a right one.
const inTags = completion.match(/<answer>(.*)<\\/answer>/);
const right = inTags !== null && inTags[1] === answer;
return right ? 2 : 1;`;

const ruined = ({ first, last }) => last < first;
const slower = ({ first, last, reference }) => last > first + 0.1 && last <= reference;

export const EXPERIMENTS = [
  { name: "pair", changes: { groupSize: 2 }, right: 1, holds: slower },
  { name: "rate", changes: { learningRate: 3e-3 }, right: 2, collapses: true, holds: ruined },
  { name: "hole", changes: { reward: "tutorials", problems: "hard", steps: 25 }, right: 2, collapses: true, holds: ({ last }) => last < 0.05 },
  { name: "coin", changes: { reward: "coin" }, right: 1, holds: () => true },
  { name: "plain", changes: { advantage: "none", reward: "own", code: POINT_FOR_ALL, steps: 30 }, right: 2, collapses: true, holds: ruined },
];
