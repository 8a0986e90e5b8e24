// GRPO: sample, reward, advantages, loss, update.  Read it beside grpo_lib/plain_grpo.py: the same five steps.
//
// One thing is in another order: the groups of a step come one after the other, and each adds its part of the gradient,
// so that only one group is in memory.  The sum is the same.

export const SETTINGS = {
  steps: 50,
  promptsPerStep: 16,
  groupSize: 8, // G
  temperature: 1,
  advantage: "std",
  epsilon: 0.2, // ε
  learningRate: 3e-4,
  warmupSteps: 5,
  adamw: { b1: 0.9, b2: 0.99, weightDecay: 0, maxNorm: 1 },
};

/** How much better each completion is than the others of its prompt. */
export function groupAdvantages(rewards, kind = "std") {
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  const difference = rewards.map((reward) => reward - mean);
  const squares = difference.reduce((sum, d) => sum + d * d, 0);
  const std = Math.sqrt(squares / (rewards.length - 1));
  // 1e-6: where all earn the same it is 0, not 0 / 0.  "none": the reward itself, without a baseline.
  const advantages = { std: (_, d) => d / (std + 1e-6), mean: (_, d) => d, none: (reward) => reward }[kind];
  return rewards.map((reward, i) => advantages(reward, difference[i]));
}

/**
 * - mean over completions of the mean over tokens of min(ρ A, clip(ρ, 1 - ε, 1 + ε) A), ρ = π / π_old.
 * @param total completions of the step, of which these are one group
 * @returns the loss, and its derivative after each log-probability
 */
export function policyLoss(logps, oldLogps, advantages, epsilon, total) {
  let loss = 0;
  const derivatives = logps.map((ofCompletion, i) => {
    const A = advantages[i], share = 1 / (ofCompletion.length * total);
    return ofCompletion.map((logp, t) => {
      const ratio = Math.exp(logp - oldLogps[i][t]);
      const clipped = Math.min(Math.max(ratio, 1 - epsilon), 1 + epsilon);
      loss -= share * Math.min(ratio * A, clipped * A);
      return clipped * A < ratio * A ? 0 : -share * ratio * A; // a clipped token no longer pulls
    });
  });
  return { loss, derivatives };
}

/**
 * One step: `batch` of problems with their prompts' tokens.
 * @param reward async (problem, texts) => points of each
 */
export async function trainStep(step, batch, settings, engine, tokenizer, reward, random) {
  const total = batch.length * settings.groupSize;
  const groups = [];
  let loss = 0;
  engine.clearGradient();
  for (const problem of batch) {
    // 1. Sample completions.
    const prompt = tokenizer.prompt(problem.question);
    const completions = engine.sample(prompt, settings.groupSize, settings.temperature, random);
    const texts = completions.map(({ tokens }) => tokenizer.decode(tokens));

    // 2. Rewards.
    const rewards = await reward(problem, texts);

    // 3. Advantages.
    const advantages = groupAdvantages(rewards, settings.advantage);

    // 4. Loss.  One update per batch: the policy that learns has sampled.  The ratio is 1; its gradient is not 0.
    const logps = completions.map((completion) => completion.logps);
    const ofGroup = policyLoss(logps, logps, advantages, settings.epsilon, total);
    engine.addGradient(ofGroup.derivatives);
    loss += ofGroup.loss;
    groups.push({ problem, prompt, completions, texts, rewards, advantages });
  }

  // 5. Update.
  const rate = settings.learningRate * Math.min(1, step / Math.max(settings.warmupSteps, 1));
  const norm = engine.update(step, rate, settings.adamw);
  return { step, loss, norm, groups };
}
