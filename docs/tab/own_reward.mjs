// A reward that the reader writes.  It runs in a worker of its own, which has no page, and by the page's content
// security policy no network; a loop that never ends is ended from outside.

export const TIME_LIMIT = 2000; // milliseconds, for one group

function sandbox(code) {
  return `"use strict";
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
  return Object.assign(new Error(message), { reason });
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

  function reward(problem, texts) {
    return new Promise((resolve, reject) => {
      const limit = setTimeout(() => {
        worker.terminate();
        reject(failure("ownTime"));
      }, TIME_LIMIT);
      const settle = (settled, value) => {
        clearTimeout(limit);
        settled(value);
      };
      worker.onerror = (event) => {
        event.preventDefault(); // it is shown in the page
        settle(reject, failure("ownError", event.message));
      };
      worker.onmessage = ({ data }) => {
        if (data?.error !== undefined) return settle(reject, failure("ownError", String(data.error)));
        try {
          settle(resolve, checked(data?.points, texts.length));
        } catch (error) {
          settle(reject, error);
        }
      };
      worker.postMessage({ texts, answer: problem.answer, question: problem.question });
    });
  }

  reward.end = () => worker.terminate();
  return reward;
}
