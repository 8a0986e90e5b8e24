import { firstStep } from "./first_step.mjs";
import { newEngine, readJson, say } from "./node.mjs";

say(firstStep(await newEngine(), readJson("first_step.json")));
