// The engine (engine/model.c) as an object: the policy's weights, sampling, gradient, update.

const THINGS = [
  "weights", "gradient", "cosines", "sines", "prompt", "promptLength", "completion", "completionLength",
  "dice", "tokenProbability", "dLogp", "probabilities",
];
const SIZES = ["weights", "sequences", "maxPrompt", "maxCompletion", "headDim", "vocabulary"];
const SAMPLE = 0, GREEDY = 1, GIVEN = 2;

/** @param bytes engine.wasm  @param config of the model's config.json  @param weights Float32Array */
export async function loadEngine(bytes, config, weights) {
  const { instance } = await WebAssembly.instantiate(bytes, {});
  const wasm = instance.exports;
  wasm.start();
  const size = Object.fromEntries(SIZES.map((name, i) => [name, wasm.size(i)]));
  const address = Object.fromEntries(THINGS.map((name, i) => [name, wasm.address(i)]));
  const floats = (name, n) => new Float32Array(wasm.memory.buffer, address[name], n);
  const integers = (name, n) => new Int32Array(wasm.memory.buffer, address[name], n);

  const tokens = size.sequences * size.maxCompletion;
  const prompt = integers("prompt", size.sequences * size.maxPrompt);
  const promptLength = integers("promptLength", size.sequences);
  const completion = integers("completion", tokens);
  const completionLength = integers("completionLength", size.sequences);
  const dice = floats("dice", tokens);
  const tokenProbability = floats("tokenProbability", tokens);
  const dLogp = floats("dLogp", tokens);
  const engine = { size, weights: floats("weights", size.weights), gradient: floats("gradient", size.weights) };

  const half = size.headDim / 2, length = size.maxPrompt + size.maxCompletion;
  const cosines = floats("cosines", length * half), sines = floats("sines", length * half);
  for (let position = 0; position < length; position++) {
    for (let i = 0; i < half; i++) {
      const angle = position * config.rope_parameters.rope_theta ** (-i / half);
      cosines[position * half + i] = Math.cos(angle);
      sines[position * half + i] = Math.sin(angle);
    }
  }

  function setPrompts(prompts) {
    prompts.forEach((ids, i) => {
      prompt.set(ids, i * size.maxPrompt);
      promptLength[i] = ids.length;
    });
  }

  function row(array, sequence) { // of one completion
    const first = sequence * size.maxCompletion;
    return array.subarray(first, first + completionLength[sequence]);
  }

  function generated(n) {
    return Array.from({ length: n }, (_, i) => ({
      tokens: Array.from(row(completion, i)),
      logps: Array.from(row(tokenProbability, i), (p) => Math.log(Math.max(p, 1e-38))),
    }));
  }

  engine.memoryBytes = () => wasm.memory.buffer.byteLength;

  engine.setWeights = (values) => {
    engine.weights.set(values);
    wasm.weights_changed();
  };
  engine.clearMoments = () => wasm.clear_moments(); // AdamW's, for a new run

  /** groupSize completions of one prompt: {tokens, logps} each.  random() is from 0 to 1. */
  engine.sample = (ids, groupSize, temperature, random) => {
    setPrompts([ids]);
    for (let i = 0; i < groupSize * size.maxCompletion; i++) dice[i] = random();
    wasm.generate(1, groupSize, temperature, SAMPLE);
    return generated(groupSize);
  };

  /** The likeliest completion of each of at most size.sequences prompts. */
  engine.greedy = (prompts) => {
    setPrompts(prompts);
    wasm.generate(prompts.length, 1, 1, GREEDY);
    return generated(prompts.length);
  };

  /** The log-probabilities of completions of one prompt that are known already: a list of tokens each. */
  engine.perTokenLogps = (ids, completions, temperature) => {
    setPrompts([ids]);
    completions.forEach((tokens, i) => {
      completion.set(tokens, i * size.maxCompletion);
      completionLength[i] = tokens.length;
    });
    wasm.generate(1, completions.length, temperature, GIVEN);
    return generated(completions.length).map((one) => one.logps);
  };

  /** Adds the gradient of a loss, given its derivative after each log-probability of the completions made last. */
  engine.addGradient = (derivatives) => {
    derivatives.forEach((values, i) => dLogp.set(values, i * size.maxCompletion));
    wasm.backward();
  };

  engine.clearGradient = () => wasm.clear_gradient();
  engine.gradientNorm = () => wasm.gradient_norm();

  /** One step of AdamW, its gradient clipped to maxNorm; returns the norm before that.  Steps count from 1. */
  engine.update = (step, rate, { b1, b2, weightDecay, maxNorm }) => {
    const norm = wasm.gradient_norm();
    wasm.adamw(rate, b1, b2, 1 - b1 ** step, 1 - b2 ** step, weightDecay, norm > maxNorm ? maxNorm / norm : 1);
    return norm;
  };

  engine.setWeights(weights);
  return engine;
}
