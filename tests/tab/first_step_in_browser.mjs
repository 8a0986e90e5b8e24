import { loadEngine } from "../../docs/tab/engine.mjs";
import { firstStep } from "./first_step.mjs";

const got = async (name, as) => (await fetch(`/${name}`))[as]();
const weights = new Float32Array(await got("weights.f32", "arrayBuffer"));
const { config } = await got("data.json", "json");
const engine = await loadEngine(await got("engine.wasm", "arrayBuffer"), config, weights);

export const result = firstStep(engine, await got("first_step.json", "json"));
