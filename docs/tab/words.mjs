// Word problems as grpo_lib.problems.words makes them: its tables (names, sentences, numbers) come with the build.
//
// The random numbers are others, so the problems are others; the splits are the same: a question belongs to exactly
// one, by a checksum of its text, and calculations that are held out from training are the same too.

import { randomNumbers, seedOf } from "./random.mjs";

const CRC_TABLE = Int32Array.from({ length: 256 }, (_, byte) => {
  for (let bit = 0; bit < 8; bit++) byte = byte & 1 ? (byte >>> 1) ^ 0xedb88320 : byte >>> 1;
  return byte;
});

/** CRC-32 of a text of ASCII, as zlib computes it. */
export function crc32(text) {
  let crc = -1;
  for (let i = 0; i < text.length; i++) crc = CRC_TABLE[(crc ^ text.charCodeAt(i)) & 255] ^ (crc >>> 8);
  return ~crc >>> 0;
}

/** "test", "validation" or "train". */
export function splitOf(question, tables) {
  return ["test", "validation"][crc32(question) % tables.hashBuckets] ?? "train";
}

/** Whether a worked solution has a calculation that nobody trains on. */
export function needsHeldOut(solution, tables) {
  return solution.match(/\d+[-+*]\d+/g).some((calculation) => {
    const [, first, operation] = calculation.match(/(\d+)([-+*])/);
    return operation !== "*" && Number(first) > tables.byHeart && crc32(calculation) % 5 === 0;
  });
}

/** One problem of any split: {question, answer, solution}.  Every intermediate result is a positive integer. */
export function draw(random, tables, difficulty) {
  const { terms, factors } = tables.difficulties[difficulty];
  const [low, high] = terms;
  const integer = (from, to) => from + Math.floor(random() * (to - from + 1));
  const choice = (list) => list[integer(0, list.length - 1)];

  const n = choice(tables.names);
  const m = choice(tables.names.filter((name) => name !== n));
  const t = choice(tables.things);
  let operation = choice("+-*");
  let a, b, c = 0;
  if (operation === "*") {
    [a, b] = factors.map(([from, to]) => integer(from, to));
  } else {
    a = integer(low, high);
    b = operation === "-" ? integer(1, a - 1) : integer(low, high);
  }
  let result = calculate(a, operation, b);
  let text = choice(tables.firstSentences[operation]);
  let solution = `${a}${operation}${b}=${result}`;
  if (random() < tables.twoStepShare) {
    operation = result > 1 ? choice("+-") : "+";
    c = operation === "-" ? integer(1, Math.min(result - 1, high)) : integer(2, high);
    text += choice(tables.secondSentences[operation]);
    const second = calculate(result, operation, c);
    solution += ` ${result}${operation}${c}=${second}`;
    result = second;
  } else if (random() < tables.distractorShare) {
    c = integer(2, high);
    text += tables.distractor;
  }
  const values = { n, m, t, a, b, c };
  const question = (text + tables.lastSentence).replace(/\{(\w)\}/g, (_, name) => values[name]);
  return { question, answer: String(result), solution };
}

function calculate(a, operation, b) {
  return { "+": a + b, "-": a - b, "*": a * b }[operation];
}

/** Problems of a split without end.  Validation and test have no question twice. */
export function* problems(split, seed, tables, difficulty) {
  const random = randomNumbers(seedOf(`${difficulty} ${split}`, seed));
  const seen = new Set();
  while (true) {
    const problem = draw(random, tables, difficulty);
    if (splitOf(problem.question, tables) !== split) continue;
    if (split === "train" ? needsHeldOut(problem.solution, tables) : seen.has(problem.question)) continue;
    if (split !== "train") seen.add(problem.question);
    yield problem;
  }
}

export function take(iterator, n) {
  return Array.from({ length: n }, () => iterator.next().value);
}
