/** Random numbers from 0 to 1, the same for the same seed: SplitMix32 (a counter whose bits are mixed). */
export function randomNumbers(seed) {
  let counter = seed | 0;
  return () => {
    counter = (counter + 0x9e3779b9) | 0;
    let bits = Math.imul(counter ^ (counter >>> 16), 0x21f0aaad);
    bits = Math.imul(bits ^ (bits >>> 15), 0x735a2d97);
    return ((bits ^ (bits >>> 15)) >>> 8) / 2 ** 24; // 24 bits: float32 holds them exactly, and never 1
  };
}

/** A seed for one purpose of a run, so that what one purpose draws does not move the others. */
export function seedOf(purpose, seed) {
  let hash = 2166136261 ^ seed; // FNV-1a
  for (const character of purpose) hash = Math.imul(hash ^ character.charCodeAt(0), 16777619);
  return hash;
}
