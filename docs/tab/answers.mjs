// The graders of grpo_lib.answers: the answer in tags, and the format.
//
// Python's reads what people and large models write, in several languages.  This one reads what the tiny model can
// write: ASCII, digits, and the words of its problems.  On sampled completions, garbled ones too, both agree
// (tests/test_tab.py).

export const TAGS = ["<reasoning>", "</reasoning>", "<answer>", "</answer>"];
const BLOCKS = /^\s*<reasoning>([^]*)<\/reasoning>\s*<answer>([^]*)<\/answer>\s*$/;
const EXACT =
  /^\n?<reasoning>\n?\S(?:[^]*\S)?\n?<\/reasoning>\n?<answer>\n?\S(?:[^]*\S)?\n?<\/answer>\n?$/;

/** Both blocks, in order and not blank, each tag exactly once; white space around them is fine. */
export function formatIsLoose(completion) {
  if (!TAGS.every((tag) => completion.split(tag).length === 2)) return false;
  const blocks = completion.match(BLOCKS);
  return blocks !== null && blocks.slice(1).every((content) => content.trim() !== "");
}

/** Exactly the template: nothing around the blocks but a line break at each edge. */
export function formatIsExact(completion) {
  return formatIsLoose(completion) && EXACT.test(completion);
}

/** The content of the last whole answer block; null if there is none. */
export function answerBlock(completion) {
  const closing = completion.lastIndexOf("</answer>");
  const opening = closing < 0 ? -1 : completion.slice(0, closing).lastIndexOf("<answer>");
  if (opening < 0) return null;
  const start = opening + "<answer>".length;
  return completion.slice(start, completion.indexOf("</answer>", start));
}

/** The number that the last whole answer block states, in its one spelling; null if there is none. */
export function extractAnswer(completion) {
  const block = answerBlock(completion);
  return block === null ? null : canonicalAnswer(block);
}

/** Whether an answer is within `ratio` of the gold. */
export function isNear(answer, gold, ratio) {
  return Math.abs(answer - gold) <= ratio * Math.abs(gold) + 1e-12;
}

// --- Which number a short text states ---

const DECIMAL = /^(-?)\$?([0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+)(?:\.([0-9]*))?%?\.?$/;
const NUMERAL = /(?<![A-Za-z_0-9])(?<![0-9][.,])[0-9][0-9.,]*|(?<![\w.)])\.[0-9]+/g;
const PLAIN = /^(?:[0-9]*\.?[0-9]+|[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?)$/;
const CONCLUSION = /\b(?:so|now|total|answer)\b|#{2,}/gi;
const CLOSING = /^(?:total|now)$/i;
const AFTER_NUMBER = /[0-9][^0-9,.;:=\n]*$/;
const GOES_ON = /^\s*(?:[,;/()-]|(?:of|for|and)\b)/i;
const OPENS_CLAUSE = /^\s*for\b/i;
const VERB = /\b(?:has|have|gives|buys|sells)\b/i;
const CALCULATED = /[-+*/^]/;
const WORD = /[A-Za-z]{2,}/;
const SPOILT_BEFORE = /(?:\b(?:not|over|more than)\b|[<>^!]|\w\s*[+*/])\W*$/i;
const SPOILT_AFTER = /^\s*(?:\^|\*\*|\+(?!\w)|!\s*(?=[-+*/=])|\s*\+\s*[A-Za-z(]|\s+\*\s+[A-Za-z(])/;

/** The one spelling of the number that a text states as its answer; null unless it states exactly one. */
export function canonicalAnswer(text) {
  text = text.trim();
  return decimal(text) ?? resultOf(text.replace(/<\/?[A-Za-z][^<>]{0,99}>/g, " "));
}

function decimal(text) {
  const match = text.match(DECIMAL);
  if (!match) return null;
  const whole = match[2].replaceAll(",", "").replace(/^0+/, "") || "0";
  const digits = (match[3] ?? "").replace(/0+$/, "");
  const number = digits ? `${whole}.${digits}` : whole;
  return match[1] && number !== "0" ? `-${number}` : number;
}

function resultOf(text) { // of a calculation: what follows its last "="
  const parts = text.replaceAll("==", "=").split("=");
  const last = parts.pop();
  if (!parts.length) return oneNumber(text);
  const previous = parts.at(-1);
  if (!/[0-9]/.test(last)) {
    const turned = parts.length === 1 && WORD.test(last) && !CALCULATED.test(previous);
    return turned ? oneNumber(previous) : null; // "18 = total", but not "9*2="
  }
  const left = decimal(previous.trim()), right = decimal(last.trim());
  if (parts.length === 1 && left && CALCULATED.test(last) && !WORD.test(last)) return oneNumber(previous); // 18 = 9*2
  return left && right && left !== right ? null : oneNumber(last); // 17 = 18 states nothing
}

function oneNumber(text, depth = 0) {
  const numbers = [...text.matchAll(NUMERAL)].map((match) => {
    const written = match[0].replace(/[.,]+$/, "");
    return { start: match.index, end: match.index + written.length, value: valueOf(written) };
  });
  if (!numbers.length) return null;
  const last = numbers.at(-1);
  if (new Set(numbers.map(({ value }) => value)).size === 1) {
    const gaps = numbers.slice(1).map((number, i) => text.slice(numbers[i].end, number.start));
    if (gaps.some((gap) => CALCULATED.test(gap) && !WORD.test(gap))) return null; // 2*2 is no way to state 2
    if (gaps.length > 1 && !gaps.some((gap) => WORD.test(gap))) return null; // 18 18 18
    return inContext(text, last);
  }
  const part = depth < 5 ? concludingPart(text) : null;
  return part === null ? null : oneNumber(part, depth + 1);
}

function concludingPart(text) { // of a text with several numbers, where its words set one apart
  for (const cue of [...text.matchAll(CONCLUSION)].reverse()) {
    const head = text.slice(0, cue.index), tail = text.slice(cue.index + cue[0].length);
    const closes = CLOSING.test(cue[0]) && AFTER_NUMBER.test(head);
    if (closes && GOES_ON.test(tail) && !VERB.test(tail)) return head; // 18 in all, 6 each
    if (/[0-9]/.test(tail) && !OPENS_CLAUSE.test(tail)) return tail;
  }
  return null;
}

function valueOf(written) {
  return PLAIN.test(written) ? decimal(written.startsWith(".") ? `0${written}` : written) : null;
}

function inContext(text, { start, end, value }) { // null where its neighbours make it another number
  const before = text.slice(0, start);
  if (value === null || SPOILT_BEFORE.test(before) || SPOILT_AFTER.test(text.slice(end))) return null;
  const sign = before.match(/-\s*$/);
  if (!sign) return value;
  const left = before.slice(0, sign.index).trimEnd();
  if (left === "" || /[=(]$/.test(left)) return value === "0" ? value : `-${value}`;
  return left.endsWith("-") ? null : value;
}
