// The page: header, summary, one tab per stage.

const TITLES = { sft: 'SFT', reward_model: 'Reward model', 'reward-model': 'Reward model', rl: 'Reinforcement learning', ppo: 'PPO', grpo: 'GRPO', rloo: 'RLOO' };
const titleOf = (name) => TITLES[name] ?? name;

function logo() {
  return svg('svg', { class: 'logo', viewBox: '0 0 28 28', 'aria-hidden': 'true' },
    [[2, 10], [9, 4], [16, 13], [23, 7]].map(([x, y], i) => svg('rect', { class: `voice${i}`, x, y, width: 4, height: 22 - y, rx: 2 })));
}

function statusChip({ status }) {
  if (!status) return el('span', { class: 'status' }, 'status unknown');
  return el('span', { class: `status ${['done', 'running', 'failed', 'interrupted'].includes(status) ? status : status.startsWith('ended') ? 'failed' : ''}` }, status);
}

const notesCard = (notes) => notes.length > 0 && el('div', { class: 'card warning' }, el('b', null, 'Parts of the run could not be read'), notes.map((text) => el('p', null, text)));
const footer = () => el('footer', null, 'Written by Quartet. This file is complete in itself and loads nothing.');

function header(data, extra) {
  const { run } = data;
  const versions = Object.entries(run.versions ?? {});
  const created = String(run.created ?? '').replace('T', ' ');
  return el('header', { class: 'masthead' },
    el('div', { class: 'brand' }, logo(), el('span', null, 'Quartet'), el('span', { class: 'dim' }, 'run report'), extra),
    el('h1', null, run.name),
    el('div', { class: 'meta' },
      statusChip(run),
      run.job && run.job !== run.name && el('span', null, run.job), created && el('span', null, created),
      versions.map(([name, version]) => el('span', { class: 'dim' }, `${name} ${version}`))));
}

function recipe(data) {
  if (data.recipe === null) return missing('The run has no recipe.yaml.');
  return el('details', { class: 'fold' }, el('summary', null, 'Recipe'), el('pre', { class: 'recipe' }, data.recipe));
}

const FRACTION_NAMES = /accuracy|exact_match|exact match|frac|fraction|_rate$/;

/** A figure of the summary, whose unit only its name tells. */
function figure(name, value) {
  if (typeof value === 'boolean') return value ? 'yes' : 'no';
  if (!finite(value)) return value === null ? '—' : typeof value === 'object' ? JSON.stringify(value) : number(value);
  if (FRACTION_NAMES.test(name) && Math.abs(value) <= 1) return withUnit(value, 'fraction');
  if (/seconds|(?<!per)_s$/.test(name)) return seconds(value);
  return number(value);
}

function headline(items) {
  return el('div', { class: 'headline' }, items.map((item) => {
    const change = finite(item.before) && finite(item.after) ? item.after - item.before : null;
    const show = (value) => withUnit(value, item.unit);
    const points = item.unit === 'fraction' ? `${number(100 * change, 3)} points` : number(change, 3);
    return el('div', { class: 'card big' }, el('span', { class: 'label' }, item.label),
      el('div', { class: 'numbers' }, item.before !== undefined && item.before !== null && [el('span', { class: 'before' }, show(item.before)), el('span', { class: 'arrow' }, '→')], el('b', null, show(item.after))),
      change !== null && el('span', { class: 'change' }, `${change >= 0 ? '+' : ''}${points}`));
  }));
}

/** The metrics that tell most about a stage come first; the others are a click away. */
const SUMMARY_FIRST = ['eval/exact_match', 'eval/', 'loss/sft', 'loss/reward_model', 'reward_model/', 'reward/score_mean', 'kl/ref', 'policy/entropy', 'throughput/tokens_per_s_per_device', 'rollout/tokens_per_s'];
const SUMMARY_SHOWN = 6;

function stageFigures(metrics) {
  const place = ([name]) => { const i = SUMMARY_FIRST.findIndex((prefix) => name.startsWith(prefix)); return i < 0 ? SUMMARY_FIRST.length : i; };
  const chips = Object.entries(metrics).map((entry, i) => [place(entry), i, entry]).sort((a, b) => a[0] - b[0] || a[1] - b[1])
    .map(([, , [name, value]]) => el('span', { class: 'chip' }, el('small', null, name), figure(name, value)));
  const rest = chips.slice(SUMMARY_SHOWN);
  return [el('div', { class: 'chips' }, chips.slice(0, SUMMARY_SHOWN)),
    rest.length > 0 && el('details', null, el('summary', null, `${rest.length} more`), el('div', { class: 'chips' }, rest))];
}

function stagesTable(stages) {
  const longest = Math.max(...stages.map((stage) => (finite(stage.seconds) ? stage.seconds : 0))) || 1;
  return el('div', { class: 'card scroll' }, el('table', { class: 'figures summary' },
    el('thead', null, el('tr', null, ['stage', 'seconds', '', 'figures'].map((text) => el('th', { scope: 'col' }, text)))),
    el('tbody', null, stages.map((stage) => el('tr', null, el('th', { scope: 'row' }, titleOf(String(stage.name))), el('td', null, finite(stage.seconds) ? seconds(stage.seconds) : '—'),
      el('td', { class: 'wide' }, el('div', { class: 'share' }, el('i', { class: 'hue0', style: { width: `${(100 * (stage.seconds || 0)) / longest}%` } }))),
      el('td', { class: 'left' }, stageFigures(stage.metrics ?? {})))))));
}

/** Completions side by side: every text field of an example a column, in the order given. */
function examplesTable(examples) {
  const columns = [...new Set(examples.flatMap((example) => Object.keys(example)))];
  return el('div', { class: 'card scroll' }, el('table', { class: 'figures examples' },
    el('thead', null, el('tr', null, columns.map((name) => el('th', { scope: 'col' }, name.replaceAll('_', ' '))))),
    el('tbody', null, examples.map((example) => el('tr', null, columns.map((name) => {
      const value = example[name];
      const verdict = name === 'verdict' && ['good', 'same', 'bad'].includes(value) ? ` verdict ${value}` : '';
      return el('td', { class: `left${verdict}` }, typeof value === 'string' ? el('span', { class: verdict ? 'pill' : 'text', dir: 'auto' }, visible(value).replaceAll('↵\n', '\n')) : figure(name, value));
    }))))));
}

const isListOfObjects = (value) => Array.isArray(value) && value.length > 0 && value.every((item) => item !== null && typeof item === 'object' && !Array.isArray(item));

/** Nested figures side by side under joined names. */
const flatten = (entries) => entries.flatMap(([name, value]) => (isListOfObjects(value) || (Array.isArray(value) && value.length === 0) ? []
  : value !== null && typeof value === 'object' && !Array.isArray(value) ? flatten(Object.entries(value).map(([key, inner]) => [`${name} ${key}`, inner]))
    : [[name, value]]));

function summarySection(data) {
  const { summary } = data;
  if (!summary) return el('section', { id: 'summary' }, el('h2', null, 'Summary'), missing('The run has no summary.json (it is written when a run ends).'), recipe(data));
  const { headline: items, stages, examples, versions, reward_hacking: told, reward_hacking_examples: shown, ...rest } = summary;
  const tables = Object.entries(rest).filter(([, value]) => isListOfObjects(value));
  const singles = flatten(Object.entries(rest));
  return el('section', { id: 'summary' }, el('h2', null, 'Summary'),
    isListOfObjects(items) && headline(items), isListOfObjects(stages) && stagesTable(stages),
    singles.length > 0 && el('div', { class: 'chips loose' }, singles.map(([name, value]) => el('span', { class: 'chip' }, el('small', null, name.replaceAll('_', ' ')), figure(name, value)))),
    tables.map(([name, rows]) => [el('h3', null, name.replaceAll('_', ' ')), examplesTable(rows)]),
    isListOfObjects(examples) && [el('h3', null, 'Side by side'), examplesTable(examples)], recipe(data));
}

/** The sections of one stage; `draw[kind]()` draws one anew when its part of the data has changed. */
function stageView(stage, data, state, remember) {
  const holders = { metrics: el('div'), timing: el('div'), rollouts: el('div') };
  const memory = { curves: {}, timing: {} };
  let viewer = null;
  const sections = [['Curves', holders.metrics], ['Timing', holders.timing], ['Tokens', holders.rollouts]].map(([title, holder]) => el('section', null, el('h3', null, title), holder));
  const open = (step) => {
    if (!viewer) return;
    viewer.openStep(nearest(viewer.steps, step));
    sections[2].scrollIntoView({ behavior: 'smooth' });
  };
  const draw = {
    metrics: () => clear(holders.metrics, curvesSection([stage], { ...data, telling: stage.telling ?? data.telling }, open, { memory: memory.curves, hint: stage.rollouts ? ', click to open the rollouts of that step' : '' })),
    timing: () => clear(holders.timing, timingSection(stage, memory.timing)),
    rollouts() {
      if (viewer) { viewer.added(); return; }
      viewer = stage.rollouts && new TokenViewer(stage.rollouts, state, remember, data.live !== undefined);
      clear(holders.rollouts, viewer ? [viewer.node, note(stage.rollouts.note)] : missing('This stage has kept no rollouts.'));
    },
    alarms() {},
    health() {},
  };
  Object.values(draw).forEach((each) => each());
  const jump = (label, target) => el('button', { class: 'link', type: 'button', onclick: () => target.scrollIntoView({ behavior: 'smooth' }) }, label);
  return { draw, node: el('div', { class: 'stage' }, sections), links: ['Curves', 'Timing', 'Tokens'].map((label, i) => jump(label, sections[i])) };
}

function readState() { return Object.fromEntries(new URLSearchParams(location.hash.slice(1))); }

function reportPage(data) {
  let state = readState();
  const remember = (change) => {
    state = { ...state, ...change };
    history.replaceState(null, '', `#${new URLSearchParams(state)}`);
  };
  const [head, tabList, links, holder] = [el('div'), el('div', { role: 'tablist', class: 'tabs' }), el('div', { class: 'links' }), el('div')];
  const pulse = data.live === undefined ? null : el('span', { class: 'pulse dim', role: 'status' }, 'live');
  const bar = el('nav', { class: 'bar' }, tabList, links);
  const views = new Map();
  let shown = null;

  function drawHead() {
    clear(head, header(data, pulse), notesCard(data.notes), alarmBanners(data), healthBanners(data), summarySection(data));
    bar.hidden = !data.stages.length;
    clear(tabList, data.stages.map((stage) => el('button', { class: 'tab', type: 'button', role: 'tab', 'aria-selected': String(stage === shown), onclick: () => { remember({ stage: stage.id }); show(stage); } },
      titleOf(stage.job && data.stages.length === 1 ? stage.job : stage.id))));
    if (!shown) clear(holder, missing('The run has logged nothing yet.'));
  }
  function show(stage) {
    shown = stage;
    if (!views.has(stage.id)) views.set(stage.id, stageView(stage, data, state, (change) => remember({ ...change, stage: stage.id })));
    drawHead();
    clear(holder, views.get(stage.id).node);
    clear(links, views.get(stage.id).links);
  }
  const first = () => data.stages.find((stage) => stage.id === state.stage) ?? data.stages.findLast((stage) => stage.rollouts) ?? data.stages[data.stages.length - 1];
  if (data.stages.length) show(first());
  else drawHead();
  if (pulse) {
    follow(data, ({ stage, kinds, isNew }) => {
      if (isNew && (!shown || shown === data.stages[data.stages.length - 2])) show(data.stages[data.stages.length - 1]);
      else if (!stage || kinds.includes('alarms') || kinds.includes('health')) drawHead();
      for (const kind of kinds ?? []) views.get(stage.id)?.draw[kind]();
    }, (text, isLost) => {
      pulse.textContent = text;
      pulse.classList.toggle('lost', isLost);
    });
  }
  return el('div', { class: 'page' }, head, bar, holder, pulse ? el('footer', null, 'Served by Quartet to this machine alone.') : footer());
}

function main() {
  const data = JSON.parse(document.getElementById('data').textContent);
  document.getElementById('page').append(data.runs ? comparePage(data) : reportPage(data));
  root.dataset.ready = '1';
}

main();
