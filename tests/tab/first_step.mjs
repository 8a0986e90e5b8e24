// The first step as plain_grpo takes it, on its prompts and completions: what the engine computes of it.
import { groupAdvantages, policyLoss } from "../../docs/tab/loop.mjs";
import { newEngine, readJson, say, writeFloats } from "./node.mjs";

const { prompts, completions, rewards, old_logps: oldLogps, settings } = readJson("first_step.json");
const engine = await newEngine();
const groupSize = completions[0].length;
const total = prompts.length * groupSize;
const result = { logps: [], advantages: [] };

function gradientOf(name, epsilon, old) {
  let loss = 0;
  engine.clearGradient();
  prompts.forEach((prompt, i) => {
    const logps = engine.perTokenLogps(prompt, completions[i], settings.temperature);
    const advantages = groupAdvantages(rewards[i]);
    const ofGroup = policyLoss(logps, old ? old[i] : logps, advantages, epsilon, total);
    engine.addGradient(ofGroup.derivatives);
    loss += ofGroup.loss;
    if (!old) result.logps.push(logps), result.advantages.push(advantages);
  });
  const norm = engine.gradientNorm();
  writeFloats(`gradient_${name}.f32`, engine.gradient);
  result[name] = { loss, norm };
}

gradientOf("off_policy", settings.epsilon, oldLogps);
gradientOf("on_policy", settings.epsilon, null);
result.greedy = engine.greedy(prompts.slice(0, engine.size.sequences)).map(({ tokens }) => tokens);
result.norm = engine.update(1, settings.learning_rate / settings.warmup_steps, {
  b1: settings.b1, b2: settings.b2, weightDecay: settings.weight_decay, maxNorm: settings.max_grad_norm,
});
writeFloats("updated.f32", engine.weights);
say(result);
