// The tiny model's tokenizer: byte-pair encoding of words, each digit by itself (tokenizer.json of the model's folder).

const WORDS = /'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+/gu; // of GPT-2
const LETTER_OF = { " ": "Ġ", "\n": "Ċ" }; // how tokenizers spell these two

/** @param json {vocab, merges, added: [{id, content, special}]} */
export function makeTokenizer({ vocab, merges, added }) {
  const rank = new Map(merges.map(([left, right], i) => [`${left} ${right}`, i]));
  const textOf = new Map();
  for (const [piece, id] of Object.entries(vocab)) textOf.set(id, piece.replaceAll("Ġ", " ").replaceAll("Ċ", "\n"));
  for (const { id, content, special } of added) textOf.set(id, special ? "" : content);
  const idOf = new Map(added.map(({ id, content }) => [content, id]));
  const escaped = added.map(({ content }) => content.replaceAll("|", "\\|"));
  const addedTokens = new RegExp(`(${escaped.join("|")})`);
  const known = new Map();

  function merged(word) { // the pair that was learnt first is joined first
    const pieces = [...word].map((letter) => LETTER_OF[letter] ?? letter);
    for (;;) {
      let best = Infinity, at = -1;
      for (let i = 0; i + 1 < pieces.length; i++) {
        const order = rank.get(`${pieces[i]} ${pieces[i + 1]}`) ?? Infinity;
        if (order < best) [best, at] = [order, i];
      }
      if (at < 0) return pieces;
      pieces.splice(at, 2, pieces[at] + pieces[at + 1]);
    }
  }

  function idsOf(word) { // a letter that the vocabulary lacks is left out
    if (!known.has(word)) known.set(word, merged(word).map((piece) => vocab[piece]).filter((id) => id !== undefined));
    return known.get(word);
  }

  function encode(text) {
    return text.split(addedTokens).flatMap((part) => {
      if (idOf.has(part)) return [idOf.get(part)];
      return part.split(/(\d)/).flatMap((piece) => (piece.match(WORDS) ?? []).flatMap(idsOf));
    });
  }

  return {
    encode,
    /** A question as the model is sent it, in its chat template. */
    prompt: (question) => encode(`<|im_start|>user\n${question}<|im_end|>\n<|im_start|>assistant\n`),
    /** Text without special tokens. */
    decode: (ids) => ids.map((id) => textOf.get(id) ?? "").join(""),
    piece: (id) => textOf.get(id) || added.find((token) => token.id === id)?.content || "",
  };
}
