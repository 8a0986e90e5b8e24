// What the tests in Node share: the engine and the data, as tests/test_tab.py has written them.
import fs from "node:fs";
import path from "node:path";

import { loadEngine } from "../../docs/tab/engine.mjs";
import { makeTokenizer } from "../../docs/tab/tokenizer.mjs";

export const [folder, ...options] = process.argv.slice(2);

export function readJson(name) {
  return JSON.parse(fs.readFileSync(path.join(folder, name)));
}

export function readFloats(name) {
  const bytes = fs.readFileSync(path.join(folder, name));
  return new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
}

export const data = readJson("data.json");
export const tokenizer = makeTokenizer(data.tokenizer);

export function newEngine() {
  return loadEngine(fs.readFileSync(path.join(folder, "engine.wasm")), data.config, readFloats("weights.f32"));
}

export function say(result) {
  console.log(JSON.stringify(result));
}
