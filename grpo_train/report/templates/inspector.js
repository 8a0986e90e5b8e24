"use strict";
// The inspector: filters, search and opening of problems. The data in the element #data:
//   phases      the evaluations of the run, of "before" and "after"; models: the model of each, or null
//   categories  [name, meaning] of the taxonomy; parts: names of the reward functions
//   notes       [points, why] of a reward part, numbered from 0
//   prompts     the prompt around the question, [before it, after it]; or [the whole prompt]
//   problems    [id, question, gold, worked solution, calculations, number of the prompt, [run per phase]]
//   run         [completion, extracted, verdict bits, category, tokens, [note per part], graded answer block or null,
//               lenient answer where the graders differ, grading error, prompt if another, [sampled]]
//   sampled     [completion, or null where together they would be too large for a page; extracted, verdict bits]
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const phases = data.phases, both = phases.length === 2;
  const SAMPLED = ["completion", "extracted", "bits"];
  const RUN = [...SAMPLED, "category", "tokens", "notes", "block", "lenientAnswer", "error", "prompt", "sampled"];
  const PROBLEM = ["id", "question", "gold", "solution", "steps", "prompt", "runs"];
  const OPEN = "<answer>";
  const VERDICTS = ["strict", "lenient", "partial", "format", "truncated", "greedy"];

  const named = (names, values) => Object.fromEntries(names.map((name, i) => [name, values[i]]));
  function unpacked(names, values) {
    const run = named(names, values);
    VERDICTS.forEach((name, bit) => { run[name] = Boolean(run.bits & (1 << bit)); });
    return run;
  }
  const problems = data.problems.map(values => {
    const problem = named(PROBLEM, values);
    problem.runs = problem.runs.map(run => unpacked(RUN, run));
    return problem;
  });

  const either = test => problem => problem.runs.some(test);
  const right = (problem, phase) => problem.runs[phase].strict;
  const when = both ? ", before or after" : "";
  const filters = [["all", "all", () => true]]; // [name, label, test, what it means]
  if (both) {
    filters.push(
      ["gained", "wrong → right", p => !right(p, 0) && right(p, 1)],
      ["lost", "right → wrong", p => right(p, 0) && !right(p, 1)],
      ["still-wrong", "still wrong", p => !right(p, 0) && !right(p, 1)]);
  } else {
    filters.push(["right", "right", p => right(p, 0)], ["wrong", "wrong", p => !right(p, 0)]);
  }
  filters.push(
    ["truncated", "truncated", either(run => run.truncated), "cut short by the length limit" + when],
    ["format-only", "form right, answer wrong", either(run => run.format && !run.strict),
      "the format is exactly as asked, and the answer is wrong" + when],
    ["graders-differ", "strict ≠ lenient", either(run => run.strict !== run.lenient), "the two graders disagree" + when],
    ["error", "grading error", either(run => run.error !== null), "the answer could not be graded" + when]);

  const PAGE = 100;
  const $ = id => document.getElementById(id);
  const search = $("search"), body = $("rows"), more = $("more"), count = $("count"), bar = $("filters"), moves = $("moves");
  const choices = phases.map((name, phase) => choice(
    name, "any answer", p => data.categories[p.runs[phase].category][0], data.categories.map(([known]) => known)));
  if ($("choice-calculations")) {
    const steps = problems.map(p => p.steps).sort((a, b) => a - b);
    choices.push(choice("calculations", "any number", p => String(p.steps ?? ""), steps.filter(n => n !== null).map(String)));
  }
  const CLEAR = { filter: "all", q: "", ...Object.fromEntries(choices.map(({ name }) => [name, ""])) };
  const state = { ...CLEAR, open: "" };
  let found = [], detail = null;

  function choice(name, any, of, order) {
    const used = new Set(problems.map(of));
    return { name, any, of, values: [...new Set(order)].filter(value => used.has(value)), select: $("choice-" + name) };
  }

  // --- a link to each problem: report.html#words-test-0-17, or #0-17 where only one problem's name ends so ---

  const linked = !document.body.classList.contains("frame"); // a notebook's frame has no address of its own
  const tail = problem => problem.id.split("-").slice(-2).join("-");
  const tails = new Map();
  for (const problem of problems) tails.set(tail(problem), (tails.get(tail(problem)) ?? 0) + 1);
  const address = problem => encodeURIComponent(tails.get(tail(problem)) === 1 ? tail(problem) : problem.id);

  function problemAt(hash) {
    let name = hash.slice(1);
    try { name = decodeURIComponent(name); } catch { /* not an address that this page has made */ }
    if (!name) return undefined;
    const ends = problems.filter(problem => problem.id.endsWith("-" + name));
    return problems.find(problem => problem.id === name) ?? (ends.length === 1 ? ends[0] : undefined);
  }
  function show(hash) {
    if (linked && hash !== location.hash) history.replaceState(null, "", hash || location.pathname + location.search);
  }
  function follow() {
    const problem = problemAt(location.hash);
    if (!problem) return;
    if (!found.includes(problem)) change(CLEAR);
    open(problem, true);
  }

  // Completions are hostile text until shown otherwise: everything goes through textContent.
  function element(tag, className, text) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    return node;
  }
  function button(text, act, className) {
    const node = element("button", className, text);
    node.type = "button";
    node.addEventListener("click", act);
    return node;
  }
  function folded(title, ...nodes) {
    const details = element("details");
    details.append(element("summary", "", title), ...nodes);
    return details;
  }

  // --- one opened problem ---

  function category(run) {
    const [name, meaning] = data.categories[run.category];
    const node = element("span", "tag", name);
    node.title = meaning;
    return node;
  }

  function completion(run) {
    const pre = element("pre");
    pre.tabIndex = 0;
    if (run.block !== null) {
      const text = run.completion, begin = text.lastIndexOf(OPEN + run.block + "</answer>") + OPEN.length;
      pre.append(text.slice(0, begin), element("mark", "", run.block), text.slice(begin + run.block.length));
    } else {
      pre.textContent = run.completion;
    }
    return pre;
  }

  function rewards(run) {
    const table = element("table"), head = element("thead"), rows = element("tbody"), foot = element("tfoot");
    head.append(element("tr"));
    for (const title of ["reward", "points", "why"]) head.firstChild.append(element("th", "", title));
    let sum = 0;
    run.notes.forEach((number, part) => {
      const [points, why] = data.notes[number], tr = element("tr"), name = element("th");
      name.scope = "row";
      for (const word of data.parts[part].split(/(?<=_)/)) name.append(word, element("wbr"));
      tr.append(name, element("td", "points", signed(points)), element("td", "", why));
      rows.append(tr);
      sum += points;
    });
    const total = element("tr");
    total.append(element("th", "", "sum"), element("td", "points", signed(sum)), element("td"));
    foot.append(total);
    table.append(head, rows, foot);
    return table;
  }

  function signed(points) {
    return String(Math.round(points * 1000) / 1000).replace("-", "−");
  }

  function pane(problem, phase) {
    const run = problem.runs[phase], section = element("section", "pane"), title = element("h3", "", phases[phase]);
    if (data.models[phase]) title.append(element("span", "note", " · " + data.models[phase]));
    title.append(category(run));
    const facts = [
      "strict: " + (run.strict ? "right" : "wrong"),
      "lenient: " + (run.lenient ? "right" : "wrong") + (run.lenientAnswer !== null ? " (" + run.lenientAnswer + ")" : ""),
      "within 10\u00a0%: " + (run.partial ? "yes" : "no"),
      "format: " + (run.format ? "exact" : "not exact"),
      "extracted: " + (run.extracted ?? "nothing")];
    if (run.tokens !== null) facts.push(run.tokens + " tokens");
    if (run.truncated) facts.push("cut short by the length limit");
    section.append(title, element("p", "note", facts.join(" · ")));
    if (run.error !== null) section.append(element("p", "error", "Counted as wrong: " + run.error));
    section.append(run.completion === "" ? element("p", "note", "The completion is empty.") : completion(run), rewards(run));
    if (run.sampled.length) section.append(sampled(run.sampled));
    if (run.prompt !== null) section.append(folded("prompt of this one", element("pre", "", run.prompt)));
    return section;
  }

  function sampled(rows) {
    const runs = rows.map(values => unpacked(SAMPLED, values)), list = element("ol");
    for (const run of runs) {
      const item = element("li");
      item.append(verdict(run));
      if (run.completion !== null) item.append(element("pre", "", run.completion));
      list.append(item);
    }
    const missing = element("p", "note", runs[0].completion === null ? "Their texts are in evals/, one JSON line each." : "");
    return folded(runs.filter(run => run.strict).length + " of " + runs.length + " sampled completions are right", missing, list);
  }

  function prompt(problem) {
    const around = data.prompts[problem.prompt];
    return around.length === 2 ? around[0] + problem.question + around[1] : around[0];
  }

  function opened(problem) {
    const row = element("tr", "detail"), td = element("td"), panes = element("div", "panes"), steer = element("div", "steer");
    td.colSpan = 3 + phases.length;
    const place = found.indexOf(problem);
    const back = button("← previous", () => open(found[place - 1], true)), on = button("next →", () => open(found[place + 1], true));
    back.disabled = place === 0;
    on.disabled = place === found.length - 1;
    steer.append(back, on, element("span", "note", (place + 1) + " of " + found.length));
    steer.append(button("close", () => close(true)));
    if (linked) {
      const link = element("a", "", "link to this problem");
      link.href = "#" + address(problem);
      steer.append(link);
    }
    problem.runs.forEach((run, phase) => panes.append(pane(problem, phase)));
    let gold = "Gold answer: " + problem.gold;
    if (problem.steps !== null) gold += " · " + problem.steps + (problem.steps === 1 ? " calculation" : " calculations");
    td.append(steer, element("p", "question", problem.question), element("p", "", gold));
    if (problem.solution) td.append(element("p", "note solution", "Worked solution: " + problem.solution));
    td.append(panes, folded("prompt, exactly as it was sent", element("pre", "", prompt(problem))));
    row.append(td);
    return row;
  }

  function fold() {
    if (!detail) return null;
    const opener = detail.previousSibling.querySelector(".open");
    detail.remove();
    detail = null;
    opener.setAttribute("aria-expanded", "false");
    return opener;
  }

  function close(focus) {
    const opener = fold();
    state.open = "";
    show("");
    if (focus) opener?.focus();
  }

  function open(problem, focus) {
    const place = found.indexOf(problem);
    if (place < 0) return;
    fold();
    while (body.childElementCount <= place) append();
    const row = body.children[place], opener = row.querySelector(".open");
    detail = opened(problem);
    row.after(detail);
    opener.setAttribute("aria-expanded", "true");
    state.open = problem.id;
    show("#" + address(problem));
    if (focus) {
      opener.focus({ preventScroll: true });
      row.scrollIntoView({ block: "start" });
    }
  }

  // --- the table ---

  function verdict(run) {
    const span = element("span");
    span.append(element("span", run.strict ? "mark yes" : "mark no", run.strict ? "✓" : "✗"),
      element("span", "sr", run.strict ? " right: " : " wrong: "),
      element("span", "value", run.extracted ?? "no answer"));
    return span;
  }

  function cell(run, label) {
    const td = element("td", "answer");
    td.dataset.label = label;
    td.append(verdict(run));
    const notes = [], name = data.categories[run.category][0];
    if (!run.strict && !(name === "no answer" && run.extracted === null)) notes.push(name);
    if (run.strict && run.truncated) notes.push("truncated");
    if (run.strict !== run.lenient) notes.push(run.lenient ? "lenient: right" : "lenient: wrong");
    if (run.error !== null) notes.push("grading error");
    if (run.sampled.length) {
      const correct = run.sampled.filter(values => values[2] & 1).length;
      notes.push(correct + " of " + run.sampled.length + " sampled right");
    }
    if (notes.length) td.append(element("span", "note", notes.join(", ")));
    return td;
  }

  function row(problem) {
    const tr = element("tr", "row"), head = element("th"), opener = element("button", "open", problem.id);
    head.scope = "row";
    opener.type = "button";
    opener.setAttribute("aria-expanded", "false");
    head.append(opener);
    const gold = element("td", "gold", problem.gold);
    gold.dataset.label = "gold";
    tr.append(head, element("td", "clip", problem.question), gold,
      ...problem.runs.map((run, phase) => cell(run, phases[phase])));
    tr.addEventListener("click", () => {
      if (String(getSelection())) return;
      if (state.open === problem.id) close(true); else open(problem, false);
    });
    return tr;
  }

  function append(n = PAGE) {
    const have = body.childElementCount - (detail ? 1 : 0);
    body.append(...found.slice(have, have + n).map(row));
    const shown = Math.min(have + n, found.length), [some, all] = [shown, found.length].map(n => n.toLocaleString("en"));
    const names = active().join(" · ");
    more.hidden = shown >= found.length;
    count.textContent = found.length === 0 ? "Nothing matches" + (names && ": " + names) + "." :
      shown < found.length ? "Showing " + some + " of " + all + "." : all + " shown.";
  }

  // What is filtered by, in words.
  function active() {
    const chosen = choices.filter(({ name }) => state[name]).map(({ name }) => name + ": " + state[name]);
    const filter = state.filter === "all" ? [] : [filterOf(state.filter)[1]];
    return [...filter, ...(state.q.trim() ? ["“" + state.q.trim() + "”"] : []), ...chosen];
  }

  let texts = null; // made at the first search
  function matching() {
    const words = state.q.toLowerCase().trim();
    if (!words) return () => true;
    texts ??= new Map(problems.map(p => [p, [p.id, p.question, p.gold, ...p.runs.flatMap(
      run => [run.completion, run.extracted ?? "", ...run.sampled.map(values => values[0] ?? "")])].join("\n").toLowerCase()]));
    return problem => texts.get(problem).includes(words);
  }
  const filterOf = wanted => filters.find(([key]) => key === wanted);
  const chosen = (problem, but) => choices.every(
    one => one === but || !state[one.name] || one.of(problem) === state[one.name]);

  function draw() {
    const searched = problems.filter(matching());
    const test = filterOf(state.filter)[2];
    const sorted = searched.filter(problem => chosen(problem));
    found = sorted.filter(test);
    for (const node of bar.children) {
      const [key, name, wanted] = filterOf(node.dataset.filter);
      node.textContent = name + " (" + sorted.filter(wanted).length + ")";
      node.setAttribute("aria-pressed", String(key === state.filter));
    }
    const filtered = searched.filter(test);
    for (const one of choices) {
      const others = filtered.filter(problem => chosen(problem, one));
      for (const option of one.select.options) {
        const n = others.filter(p => !option.value || one.of(p) === option.value).length;
        option.textContent = (option.value || one.any) + " (" + n + ")";
      }
      one.select.value = state[one.name];
    }
    $("clear").hidden = active().length === 0;
    if (moves) drawMoves(filtered);
    detail = null;
    body.replaceChildren();
    append();
    const wanted = found.find(problem => problem.id === state.open);
    state.open = "";
    if (wanted) open(wanted, false);
  }

  function drawMoves(list) {
    const used = [0, 1].map(phase => [...new Set(problems.map(p => p.runs[phase].category))].sort((a, b) => a - b));
    const table = element("table"), head = element("tr");
    head.append(element("th", "", "before ↓ after →"));
    for (const after of used[1]) head.append(element("th", "", data.categories[after][0]));
    table.append(element("thead"), element("tbody"));
    table.firstChild.append(head);
    for (const before of used[0]) {
      const tr = element("tr"), title = element("th", "", data.categories[before][0]);
      title.scope = "row";
      tr.append(title);
      for (const after of used[1]) {
        const n = list.filter(p => p.runs[0].category === before && p.runs[1].category === after).length;
        const names = { before: data.categories[before][0], after: data.categories[after][0] };
        const pressed = state.before === names.before && state.after === names.after;
        const td = element("td", before === after ? "same" : "");
        if (n) {
          const node = button(String(n), () => change(pressed ? { before: "", after: "" } : names));
          node.setAttribute("aria-pressed", String(pressed));
          node.setAttribute("aria-label", n + " from " + names.before + " to " + names.after);
          td.append(node);
        }
        tr.append(td);
      }
      table.lastChild.append(tr);
    }
    moves.querySelector("table")?.remove();
    moves.append(table);
  }

  // --- what is chosen ---

  function change(what) {
    Object.assign(state, what);
    search.value = what.q ?? search.value; // else it may hold what is being typed
    draw();
  }

  // --- controls and keys ---

  for (const [key, , test, meaning] of filters) {
    if (key === "error" && !problems.some(test)) continue;
    const node = button("", () => change({ filter: key }));
    node.dataset.filter = key;
    if (meaning) node.title = meaning;
    bar.append(node);
  }
  for (const { name, values, select } of choices) {
    for (const value of ["", ...values]) {
      select.append(element("option", "", value));
      select.lastChild.value = value;
    }
    select.addEventListener("change", () => change({ [name]: select.value }));
  }
  $("clear").addEventListener("click", () => {
    change(CLEAR);
    bar.firstChild.focus();
  });
  let waiting = 0;
  search.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => change({ q: search.value }), 120);
  });
  more.addEventListener("click", () => append(5 * PAGE));

  function step(by) {
    const focused = document.activeElement.closest?.("tr.row");
    const here = detail ? detail.previousSibling : focused;
    const rows = [...body.querySelectorAll("tr.row")];
    const place = here ? rows.indexOf(here) + by : 0;
    if (place < 0 || place >= found.length) return;
    if (detail) { open(found[place], true); return; }
    while (body.childElementCount <= place) append();
    const opener = body.children[place].querySelector(".open");
    opener.focus({ preventScroll: true });
    opener.scrollIntoView({ block: "nearest" });
  }
  addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.matches?.("input, select, textarea");
    if (event.key === "Escape") {
      if (detail) close(true); else if (typing && search.value) change({ q: "" });
    } else if (typing) {
      return;
    } else if (event.key === "/") {
      search.focus();
      search.select();
    } else if (event.key === "j" || event.key === "k") {
      step(event.key === "j" ? 1 : -1);
    } else if (/^Arrow(Down|Up)$/.test(event.key) && event.target.matches?.(".open")) {
      step(event.key === "ArrowDown" ? 1 : -1);
    } else {
      return;
    }
    event.preventDefault();
  });

  draw();
  if (linked) {
    addEventListener("hashchange", follow);
    follow();
  }
  performance.mark("answers-drawn");
  document.documentElement.dataset.ready = Math.round(performance.now()); // milliseconds since the page was asked for
})();
