// Several runs on one page: what differs in their recipes, their curves over each other, their answers side by side.

const runKey = (run, i) => el('span', { class: `key run${i % NUM_HUES}` }, run.name);

function comparedTable(runs, first, rows, cell) {
  return el('div', { class: 'card scroll' }, el('table', { class: 'figures compared' },
    el('thead', null, el('tr', null, el('th', { scope: 'col' }, first), runs.map((run, i) => el('th', { scope: 'col' }, runKey(run, i))))),
    el('tbody', null, rows.map(([name, values]) => el('tr', null, el('th', { scope: 'row' }, name), values.map((value, i) => el('td', null, cell(value, name, i))))))));
}

function recipeDifferences({ runs, differences }) {
  if (differences === null) return missing('Not every run has a recipe.yaml that can be read.');
  if (!differences.length) return missing('The recipes are equal.');
  return comparedTable(runs, 'key', differences, (value) => (value === undefined || value === null ? el('span', { class: 'dim' }, '—') : value));
}

/** Mean ± standard deviation (n − 1) of the finite values; with fewer than two the value alone. */
function spread(values, unit) {
  const known = values.filter(finite);
  if (known.length < 2) return known.length ? withUnit(known[0], unit) : '—';
  const mean = known.reduce((a, b) => a + b, 0) / known.length;
  return `${withUnit(mean, unit)} ± ${withUnit(Math.sqrt(known.reduce((a, b) => a + (b - mean) ** 2, 0) / (known.length - 1)), unit)}`;
}

/** What the seeds of a recipe have in common and how far they are from each other; nothing where no recipe has several. */
function seedFigures({ seeds, explained: about }, rows) {
  return seeds.length > 0 && el('div', { class: 'card scroll' }, el('table', { class: 'figures compared' },
    el('thead', null, el('tr', null, ['last value, mean ± deviation over seeds', ...seeds.map((group) => `${group.name || 'the recipe'} (${group.runs.length} seeds)`)].map((text) => el('th', { scope: 'col' }, text)))),
    el('tbody', null, rows.map(([name, values]) => el('tr', null, el('th', { scope: 'row' }, name), seeds.map((group) => el('td', null, spread(group.runs.map((i) => values[i]), about[name]?.unit))))))));
}

/** The last value of the metrics that tell most, for every run. */
function lastFigures(data, members) {
  const names = data.telling.filter((name) => members.some(({ stage }) => stage.metrics?.series[name]));
  const last = (stage, name) => lastKnown(stage?.metrics?.series[name] ?? []);
  const stageOf = (i) => members.find((member) => member.hue === i)?.stage;
  const rows = names.map((name) => [name, data.runs.map((_, i) => last(stageOf(i), name))]);
  return [seedFigures(data, rows), comparedTable(data.runs, 'last value', [['steps', data.runs.map((_, i) => stageOf(i)?.metrics?.steps.at(-1) ?? null)], ...rows],
    (value, name) => withUnit(value, data.explained[name]?.unit))];
}

/** Answers of all runs to one prompt, each run's at its step nearest to the chosen one. */
class AnswerColumns {
  constructor(runs, members) {
    this.runs = runs;
    this.members = members.filter(({ stage }) => stage.rollouts);
    for (const { stage } of this.members) keepPictures(stage.rollouts.pictures);
    this.box = el('div');
    this.quantity = 'advantage';
    const steps = [...new Set(this.members.flatMap(({ stage }) => stage.rollouts.steps))].sort((a, b) => a - b).map(String);
    this.step = steps[steps.length - 1];
    this.promptBox = el('span');
    const all = this.members.flatMap(({ stage }) => Object.values(stage.rollouts.samples).flat());
    const colours = Object.entries(QUANTITIES).filter(([, { read }]) => all.some((sample) => read(sample)));
    if (!colours.some(([key]) => key === this.quantity)) this.quantity = colours[0]?.[0] ?? this.quantity;
    this.node = el('div', { class: 'card viewer' }, el('div', { class: 'toolbar' },
      stepper('step', steps.map((step) => [step, step]), this.step, (step) => { this.step = step; this.drawPrompts(); }), this.promptBox,
      select('colour by', colours.map(([key, { label }]) => [key, label]), this.quantity, (key) => { this.quantity = key; this.draw(); })), this.box);
    this.drawPrompts();
  }

  samplesOf({ stage }) { return stage.rollouts.samples[nearest(stage.rollouts.steps, this.step)]; }

  drawPrompts() {
    const counts = new Map();
    for (const member of this.members) for (const id of new Set(this.samplesOf(member).map((sample) => sample.prompt))) counts.set(id, (counts.get(id) ?? 0) + 1);
    const ids = [...counts.keys()].sort((a, b) => counts.get(b) - counts.get(a)); // those first that most runs answer
    if (!counts.has(this.prompt)) [this.prompt] = ids;
    const text = (id) => this.members.map(({ stage }) => stage.rollouts.prompts[id]?.text).find(Boolean) ?? id;
    clear(this.promptBox, stepper('prompt', ids.map((id) => [id, `…${visible(text(id).slice(-50)).replaceAll('\n', ' ')}`]), this.prompt, (id) => { this.prompt = id; this.draw(); }));
    this.draw();
  }

  draw() {
    const found = this.members.map((member) => ({ member, samples: this.samplesOf(member).filter((sample) => sample.prompt === this.prompt) }));
    const scale = colourScale(QUANTITIES[this.quantity], found.flatMap(({ samples }) => samples));
    const prompt = this.members.map(({ stage }) => stage.rollouts.prompts[this.prompt]).find(Boolean);
    clear(this.box, legend(QUANTITIES[this.quantity], scale, found.some(({ samples }) => samples.some(hasObservations))),
      prompt && promptText(prompt),
      el('div', { class: 'columns', style: { '--runs': String(found.length) } }, found.map(({ member: { stage, hue }, samples }) => el('div', null,
        el('h5', null, runKey(this.runs[hue], hue), el('small', null, `step ${nearest(stage.rollouts.steps, this.step)}`)),
        samples.length ? samples.map((sample) => el('article', { class: 'sibling' }, el('header', null, scoreChip(sample.score), el('span', { class: 'dim' }, sample.finish === 'stop' ? `${number(sample.length)} tokens` : sample.finish)),
          tokenText(sample, this.quantity, scale).node)) : missing('This run has no answer to this prompt at this step.')))));
  }
}

function comparedStage(data, id) {
  const members = data.runs.flatMap((run, hue) => run.stages.filter((stage) => stage.id === id).map((stage) => ({ stage, hue })));
  const keeps = members.some(({ stage }) => stage.rollouts);
  return el('div', { class: 'stage' },
    el('section', null, el('h3', null, 'Figures'), lastFigures(data, members)),
    el('section', null, el('h3', null, 'Curves'), el('div', { class: 'meta' }, data.runs.map(runKey)), curvesSection(members.map(({ stage, hue }) => ({ metrics: stage.metrics, hue })), data, () => {})),
    el('section', null, el('h3', null, 'Answers'), keeps ? new AnswerColumns(data.runs, members).node : missing('No run has kept rollouts of this stage.')));
}

function comparePage(data) {
  const ids = [...new Set(data.runs.flatMap((run) => run.stages.map((stage) => stage.id)))];
  const holder = el('div');
  const tabs = ids.map((id) => el('button', { class: 'tab', type: 'button', role: 'tab', onclick: () => show(id) }, titleOf(id)));
  function show(id) {
    tabs.forEach((tab, i) => tab.setAttribute('aria-selected', String(ids[i] === id)));
    clear(holder, comparedStage(data, id));
  }
  if (ids.length) show(ids[ids.length - 1]);
  return el('div', { class: 'page' },
    el('header', { class: 'masthead' }, el('div', { class: 'brand' }, logo(), el('span', null, 'Quartet'), el('span', { class: 'dim' }, 'comparison of runs')),
      el('h1', null, `${data.runs.length} runs`),
      data.runs.map((run, i) => el('div', { class: 'meta' }, runKey(run, i), statusChip(run), run.created && el('span', { class: 'dim' }, String(run.created).replace('T', ' '))))),
    notesCard(data.notes),
    el('section', null, el('h2', null, 'What differs in the recipes'), recipeDifferences(data)),
    ids.length > 0 ? [el('nav', { class: 'bar' }, el('div', { role: 'tablist', class: 'tabs' }, tabs)), holder] : missing('The runs have logged nothing yet.'),
    footer());
}
