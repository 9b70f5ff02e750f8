// The curves of one stage: the most telling ones first, all of them by family below.

const TELLING = [
  'eval/exact_match', 'reward/score_mean', 'kl/ref', 'policy/entropy', 'critic/explained_variance', 'policy/approx_kl',
  'rollout/length_mean', 'agreement/logprob_diff_max', 'eval/score_mean', 'policy/clip_frac', 'loss/value',
  'loss/sft', 'eval/loss', 'eval/accuracy', 'sft/perplexity', 'loss/reward_model', 'reward_model/accuracy', 'reward_model/margin',
  'optim/lr', 'throughput/tokens_per_s_per_device', 'rollout/tokens_per_s',
];
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

/** One card: name, value, chart. `shared` holds what all cards of the stage have in common. */
function curveCard(name, metrics, shared) {
  const about = shared.explained[name];
  const unit = about?.unit;
  const all = metrics.series[name];
  const rows = metrics.steps.map((step, i) => [step, all[i]]).filter(([, value]) => value !== null);
  const steps = rows.map(([step]) => step);
  const series = rows.map(([, value]) => value);
  const shownUnit = ['fraction', 's', 'bytes', '1', undefined].includes(unit) ? '' : unit;
  const value = el('span', { class: 'value' });
  const when = el('span', { class: 'when' });
  const holder = el('div', { class: 'plot' });
  const title = explained(el('button', { class: 'metric', type: 'button' }, name), () => explanation(name, about));
  let chart;

  function settle() {
    value.textContent = withUnit(lastKnown(series), unit);
    when.textContent = shownUnit;
  }
  function mark(step) {
    const here = chart.mark(step);
    if (step === null || here === undefined) settle();
    else { value.textContent = withUnit(here, unit); when.textContent = `step ${number(step)}`; }
  }
  function draw() {
    const label = `${name}, ${steps.length} steps, from ${withUnit(series[0], unit)} to ${withUnit(lastKnown(series), unit)}`;
    chart = lineChart(steps, series, { unit, smoothing: shared.smoothing, label });
    chart.node.addEventListener('pointermove', (event) => shared.mark(chart.stepAt(event)));
    chart.node.addEventListener('pointerleave', () => shared.mark(null));
    chart.node.addEventListener('click', (event) => shared.open(chart.stepAt(event)));
    clear(holder, chart.node);
  }
  draw();
  settle();
  return {
    node: el('figure', { class: 'card curve' }, el('figcaption', null, title, el('span', { class: 'reading' }, value, when)), holder),
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

/** The section with all curves; `open(step)` is called when a step is clicked. */
function curvesSection(stage, explainedNames, open) {
  const { metrics } = stage;
  if (!metrics) return missing('This stage has logged no metrics (metrics.jsonl).');
  const cards = [];
  const shared = {
    explained: explainedNames, smoothing: 0, open,
    mark: (step) => cards.forEach((card) => card.mark(step)),
  };
  const grid = (names) => el('div', { class: 'cards' }, names.map((name) => {
    const card = curveCard(name, metrics, shared);
    cards.push(card);
    return card.node;
  }));
  const names = Object.keys(metrics.series);
  const telling = TELLING.filter((name) => names.includes(name)).slice(0, NUM_TELLING);
  const rest = names.filter((name) => !telling.includes(name));
  const top = telling.length ? telling : rest.splice(0, NUM_TELLING);
  const panels = el('div');
  const families = [...curveFamilies(rest)].map(([family, members]) => {
    let panel = null; // drawn when first asked for
    const button = el('button', { class: 'pick', type: 'button', 'aria-expanded': 'false', onclick: () => {
      if (!panel) {
        panel = el('div', { class: 'family' }, el('h4', null, family), grid(members));
        panels.append(panel);
      }
      const open = button.getAttribute('aria-expanded') === 'false';
      button.setAttribute('aria-expanded', String(open));
      panel.hidden = !open;
    } }, family, el('span', { class: 'count' }, `${members.length}`));
    return button;
  });
  const output = el('output', null, 'off');
  const slider = el('input', { type: 'range', min: 0, max: 0.95, step: 0.05, value: 0, 'aria-label': 'smoothing', oninput: () => {
    shared.smoothing = Number(slider.value);
    output.textContent = shared.smoothing ? shared.smoothing.toFixed(2) : 'off';
    cards.forEach((card) => card.draw());
  } });
  const hint = stage.rollouts ? 'Hover to read all curves at one step, click to open the rollouts of that step. ' : 'Hover to read all curves at one step. ';
  return el('div', null,
    el('div', { class: 'toolbar' }, el('label', { class: 'field' }, el('span', null, 'smoothing'), slider, output),
      el('p', { class: 'hint' }, hint, 'Point at a name for what it means.')),
    grid(top), families.length > 0 && el('div', { class: 'families' }, el('span', { class: 'dim' }, 'more'), families), panels, note(metrics.note));
}
