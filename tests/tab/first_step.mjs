// The first step as plain_grpo takes it, on its prompts and completions: what the engine computes of it.  It runs in
// Node and in a browser.
import { groupAdvantages, policyLoss } from "../../docs/tab/loop.mjs";

export function firstStep(engine, { prompts, completions, rewards, old_logps: oldLogps, settings }) {
  const groupSize = completions[0].length;
  const total = prompts.length * groupSize;
  const result = { logps: [], advantages: [] };

  function gradientOf(epsilon, old) {
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
    return { loss, norm: engine.gradientNorm(), gradient: base64(engine.gradient) };
  }

  result.off_policy = gradientOf(settings.epsilon, oldLogps);
  result.on_policy = gradientOf(settings.epsilon, null);
  result.greedy = engine.greedy(prompts.slice(0, engine.size.sequences)).map(({ tokens }) => tokens);
  engine.update(1, settings.learning_rate / settings.warmup_steps, {
    b1: settings.b1, b2: settings.b2, weightDecay: settings.weight_decay, maxNorm: settings.max_grad_norm,
  });
  result.updated = base64(engine.weights);
  return result;
}

function base64(floats) {
  const bytes = new Uint8Array(floats.buffer, floats.byteOffset, floats.byteLength);
  let text = "";
  for (let i = 0; i < bytes.length; i += 8192) text += String.fromCharCode(...bytes.subarray(i, i + 8192));
  return btoa(text);
}
