// Five guided experiments.  Of each: what it changes of the course's settings, which of its three predictions comes true,
// and whether it is known to end worse than it began.  Its words are in texts.json: NAME, NAMEAsk, NAME0 to NAME2,
// NAMEOutcome, NAMESection.

const POINT_FOR_ALL = `// A point for every answer, and one more for a right one.
const inTags = completion.match(/<answer>(.*)<\\/answer>/);
const right = inTags !== null && inTags[1] === answer;
return right ? 2 : 1;`;

export const EXPERIMENTS = [
  { name: "pair", changes: { groupSize: 2 }, right: 1 },
  { name: "rate", changes: { learningRate: 3e-3 }, right: 2, collapses: true },
  { name: "hole", changes: { reward: "tutorials", problems: "hard", steps: 25 }, right: 2, collapses: true },
  { name: "coin", changes: { reward: "coin" }, right: 1 },
  { name: "plain", changes: { advantage: "none", reward: "own", code: POINT_FOR_ALL, steps: 30 }, right: 2, collapses: true },
];
