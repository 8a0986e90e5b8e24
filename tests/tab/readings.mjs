// What the page says of figures and of answers, for the cases in readings.json, [{name, given: [...]}].
import * as readings from "../../docs/tab/readings.mjs";
import { gradeOf } from "../../docs/tab/rewards.mjs";
import { readJson, say } from "./node.mjs";

const functions = { ...readings, gradeOf };
say(readJson("readings.json").map(({ name, given }) => functions[name](...given)));
