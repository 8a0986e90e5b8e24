// The page's example answers, with the points that its default reward gives for them.
import { EXAMPLES } from "../../docs/tab/experiments.mjs";
import { courseReward } from "../../docs/tab/rewards.mjs";
import { say } from "./node.mjs";

say(EXAMPLES.map(({ answer, points }) => ({ answer, points, earned: courseReward(answer, "2") })));
