// The curves of one stage, of one run or of several: the most telling ones first, all of them by family below.

const NUM_TELLING = 9;

function explanation(name, about) {
  if (!about) return [el('strong', null, name), el('p', null, 'This metric is not in the table of metrics.')];
  return [
    el('strong', null, name), el('span', { class: 'unit' }, about.unit === '1' ? 'no unit' : about.unit),
    el('p', null, about.meaning), el('p', { class: 'bad' }, el('b', null, 'A bad value: '), about.bad),
  ];
}

function lastKnown(series) {
  for (let i = series.length - 1; i >= 0; i -= 1) if (series[i] !== null) return series[i];
  return null;
}

/** The steps and values of a metric in one run, without gaps. */
function lineOf(name, { metrics, hue }) {
  const all = metrics.series[name] ?? [];
  const rows = metrics.steps.map((step, i) => [step, all[i]]).filter(([, value]) => value !== null && value !== undefined);
  return { steps: rows.map(([step]) => step), series: rows.map(([, value]) => value), hue };
}

/** One card: name, value (of several runs each its own), chart. `shared` holds what all cards of the stage have in common. */
function curveCard(name, runs, shared) {
  const about = shared.explained[name];
  const unit = about?.unit;
  const lines = runs.map((run) => lineOf(name, run)).filter((line) => line.steps.length);
  const shownUnit = ['fraction', 's', 'bytes', '1', undefined].includes(unit) ? '' : unit;
  const values = lines.map((line) => el('span', { class: `value${line.hue === undefined ? '' : ` run${line.hue % NUM_HUES}`}` }));
  const when = el('span', { class: 'when' });
  const holder = el('div', { class: 'plot' });
  const title = explained(el('button', { class: 'metric', type: 'button' }, name), () => explanation(name, about));
  let chart;

  function settle() {
    values.forEach((value, i) => { value.textContent = withUnit(lastKnown(lines[i].series), unit); });
    when.textContent = shownUnit;
  }
  function mark(step) {
    const here = chart.mark(step);
    if (here.every((value) => value === undefined)) settle();
    else {
      values.forEach((value, i) => { value.textContent = here[i] === undefined ? '—' : withUnit(here[i], unit); });
      when.textContent = `step ${number(step)}`;
    }
  }
  function draw() {
    const label = `${name}, ${lines.map(({ steps, series }) => `${steps.length} steps, from ${withUnit(series[0], unit)} to ${withUnit(lastKnown(series), unit)}`).join('; ')}`;
    chart = lineChart(lines, { unit, smoothing: shared.smoothing, label });
    chart.node.addEventListener('pointermove', (event) => shared.mark(chart.stepAt(event)));
    chart.node.addEventListener('pointerleave', () => shared.mark(null));
    chart.node.addEventListener('click', (event) => shared.open(chart.stepAt(event)));
    clear(holder, chart.node);
  }
  draw();
  settle();
  return {
    node: el('figure', { class: 'card curve' }, el('figcaption', null, title, el('span', { class: 'reading' }, values, when)), holder),
    mark, draw,
  };
}

function curveFamilies(names) {
  const families = new Map();
  for (const name of names) {
    const family = name.includes('/') ? name.split('/')[0] : 'other';
    families.set(family, [...(families.get(family) ?? []), name]);
  }
  return families;
}

/**
 * The section with all curves of `runs` (`metrics`, and where there are several a `hue`).
 * `open(step)` is called when a step is clicked; `memory` keeps smoothing and open families from one drawing to the next.
 */
function curvesSection(runs, { explained: explainedNames, telling: order }, open, { memory = {}, hint = '' } = {}) {
  runs = runs.filter((run) => run.metrics);
  if (!runs.length) return missing('This stage has logged no metrics (metrics.jsonl).');
  memory.families ??= new Set();
  const cards = [];
  const shared = {
    explained: explainedNames, smoothing: memory.smoothing ?? 0, open,
    mark: (step) => cards.forEach((card) => card.mark(step)),
  };
  const grid = (names) => el('div', { class: 'cards' }, names.map((name) => {
    const card = curveCard(name, runs, shared);
    cards.push(card);
    return card.node;
  }));
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.metrics.series)))].sort();
  const telling = order.filter((name) => names.includes(name)).slice(0, NUM_TELLING);
  const rest = names.filter((name) => !telling.includes(name));
  const top = telling.length ? telling : rest.splice(0, NUM_TELLING);
  const panels = el('div');
  const families = [...curveFamilies(rest)].map(([family, members]) => {
    let panel = null; // drawn when first asked for
    const button = el('button', { class: 'pick', type: 'button', onclick: () => toggle(!memory.families.has(family)) }, family, el('span', { class: 'count' }, `${members.length}`));
    function toggle(isOpen) {
      if (isOpen && !panel) {
        panel = el('div', { class: 'family' }, el('h4', null, family), grid(members));
        panels.append(panel);
      }
      if (panel) panel.hidden = !isOpen;
      button.setAttribute('aria-expanded', String(isOpen));
      memory.families[isOpen ? 'add' : 'delete'](family);
    }
    toggle(memory.families.has(family));
    return button;
  });
  const smoothed = () => (shared.smoothing ? shared.smoothing.toFixed(2) : 'off');
  const output = el('output', null, smoothed());
  const slider = el('input', { type: 'range', min: 0, max: 0.95, step: 0.05, 'aria-label': 'smoothing', oninput: () => {
    shared.smoothing = memory.smoothing = Number(slider.value);
    output.textContent = smoothed();
    cards.forEach((card) => card.draw());
  } });
  slider.value = shared.smoothing;
  return el('div', null,
    el('div', { class: 'toolbar' }, el('label', { class: 'field' }, el('span', null, 'smoothing'), slider, output),
      el('p', { class: 'hint' }, 'Hover to read all curves at one step', hint, '. Point at a name for what it means.')),
    grid(top), families.length > 0 && el('div', { class: 'families' }, el('span', { class: 'dim' }, 'more'), families), panels);
}
