// The ticks of an axis, for the lists of values in ticks.json.
import { roundTicks } from "../../docs/tab/chart.mjs";
import { readJson, say } from "./node.mjs";

say(readJson("ticks.json").map(roundTicks));
