// Five guided experiments.  Of each: what it changes of the course's settings, which of its three predictions comes true,
// and how many steps it takes.  Its words are in texts.json: NAME, NAMEAsk, NAME0 to NAME2, NAMEOutcome, NAMESection.

export const EXPERIMENTS = [
  { name: "pair", changes: { groupSize: 2 }, right: 1 },
  { name: "rate", changes: { learningRate: 3e-3 }, right: 2 },
  { name: "hole", changes: { reward: "tutorials", problems: "hard", steps: 25 }, right: 2 },
  { name: "coin", changes: { reward: "coin" }, right: 1 },
  { name: "plain", changes: { advantage: "none" }, right: 1 },
];
