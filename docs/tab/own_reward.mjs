// A reward that the reader writes.  It runs in a worker of its own, which has no page, and by the page's content
// security policy no network; a loop that never ends is ended from outside.

export const TIME_LIMIT = 2000; // milliseconds, for one group
const LONGEST_MESSAGE = 300; // characters, of what is shown of an error or a value

function sandbox(code) {
  return `"use strict";
postMessage("started");
const score = (completion, answer, question) => {
${code}
};
onmessage = ({ data: { texts, answer, question } }) => {
  try {
    postMessage({ points: texts.map((text) => score(text, answer, question)) });
  } catch (error) {
    postMessage({ error: String(error) });
  }
};`;
}

function failure(reason, message = "") {
  return Object.assign(new Error(message.slice(0, LONGEST_MESSAGE)), { reason });
}

function checked(points, n) { // true and false are 1 and 0
  if (!Array.isArray(points) || points.length !== n) throw failure("ownValue", String(points));
  return points.map((value) => {
    const number = typeof value === "boolean" ? Number(value) : value;
    if (!Number.isFinite(number)) throw failure("ownValue", String(value));
    return number;
  });
}

/** @returns async (problem, texts) => points; throws an error with a reason: ownError, ownTime, ownValue */
export function ownReward(code) {
  const address = URL.createObjectURL(new Blob([sandbox(code)], { type: "text/javascript" }));
  const worker = new Worker(address);

  function nextMessage(limit = Infinity) {
    return new Promise((resolve, reject) => {
      worker.onmessage = ({ data }) => resolve(data);
      worker.onerror = (event) => {
        event.preventDefault(); // it is shown in the page
        reject(failure("ownError", event.message));
      };
      if (limit < Infinity) setTimeout(() => reject(failure("ownTime")), limit); // too late where it is settled
    });
  }

  const started = nextMessage();
  started.catch(() => {}); // said where it is awaited

  async function reward(problem, texts) {
    await started; // a busy machine may take seconds to start a worker: these do not count
    worker.postMessage({ texts, answer: problem.answer, question: problem.question });
    const data = await nextMessage(TIME_LIMIT);
    if (data?.error !== undefined) throw failure("ownError", String(data.error));
    return checked(data?.points, texts.length);
  }

  reward.end = () => worker.terminate();
  return reward;
}
