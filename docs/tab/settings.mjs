// What the controls say, as an object and as a link: only what differs from the course's own settings is in it.

import { SETTINGS } from "./loop.mjs";

export const OWN_REWARD = `// completion: text; answer: the right number, as text; question: text
const inTags = completion.match(/<answer>(.*)<\\/answer>/);
if (!inTags) return 0;
return inTags[1] === answer ? 1 : 0;`;

// The controls in their order: name -> values, the first being the course's.
export const CHOICES = {
  reward: ["course", "tutorials", "form", "coin", "own"],
  problems: ["standard", "hard"],
  groupSize: [8, 2, 4, 16],
  learningRate: [3e-4, 3e-5, 1e-4, 1e-3, 3e-3],
  temperature: [1, 0.6, 0.8, 1.2, 1.5],
  advantage: ["std", "mean", "none"],
};

const LONGEST_CODE = 4000; // characters, in a link

export function courseSettings() {
  const first = Object.fromEntries(Object.entries(CHOICES).map(([name, values]) => [name, values[0]]));
  return { ...SETTINGS, ...first, seed: 0, code: OWN_REWARD };
}

/** Settings from a link's fragment; what it does not say, or says wrongly, is the course's. */
export function fromLink(fragment) {
  const asked = new URLSearchParams(fragment);
  const settings = courseSettings();
  for (const [name, values] of Object.entries(CHOICES)) {
    settings[name] = values.find((value) => String(value) === asked.get(name)) ?? settings[name];
  }
  settings.seed = validSeed(asked.get("seed"));
  const code = asked.get("code");
  if (code && code.length <= LONGEST_CODE) settings.code = code;
  return settings;
}

export function validSeed(text) {
  const seed = Number(text ?? 0);
  return Number.isInteger(seed) && seed >= 0 && seed < 2 ** 31 ? seed : 0;
}

export function toLink(settings, language) {
  const said = new URLSearchParams();
  for (const name of differences(settings, courseSettings())) said.set(name, settings[name]);
  if (language !== "en") said.set("lang", language);
  return said.toString();
}

/** The names of the controls in which two settings differ. */
export function differences(one, other) {
  const names = [...Object.keys(CHOICES), "seed"].filter((name) => one[name] !== other[name]);
  return one.reward === "own" && one.code !== other.code ? [...names, "code"] : names;
}

/** Whether a run with these settings is known to end worse than it began. */
export function collapses(settings) {
  const hole = settings.reward === "tutorials" && settings.problems === "hard";
  return hole || settings.learningRate >= 3e-3;
}
