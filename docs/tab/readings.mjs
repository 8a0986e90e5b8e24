// Which sentence fits what was measured: keys of texts.json.  The policy that learns has sampled, so the ratio is 1
// and the loss is minus the mean advantage.

export const VISIBLE = 0.02; // a token's change of log-probability; less than this is too pale to see
const ROUNDS_TO_0 = 0.005;

/** Step 3 of the loop, by the setting. */
export function advantageReading(advantage) {
  return advantage === "none" ? "loop2None" : "loop2Figure";
}

export function lossReading({ norm, equalGroups }, advantage) {
  if (advantage === "none") return "loop3None";
  if (equalGroups === 1) return "loop3Equal";
  return norm < ROUNDS_TO_0 ? "loop3Small" : "loop3Figure";
}

export function normReading({ norm }) {
  return norm < ROUNDS_TO_0 ? "loop4Small" : "loop4Figure";
}

/** Where an advantage pushes its answer. */
export function pushReading(advantage) {
  if (Math.abs(advantage) < ROUNDS_TO_0) return "pushNone";
  return advantage > 0 ? "pushUp" : "pushDown";
}

/** Where the answer went: change is that of its log-probability. */
export function moveReading(advantage, change) {
  if (Math.abs(change) < ROUNDS_TO_0) return "movedNot";
  if (Math.abs(advantage) < ROUNDS_TO_0) return "movedAlong";
  return change > 0 === advantage > 0 ? "movedSo" : "movedAgainst";
}
