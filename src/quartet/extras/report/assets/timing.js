// Stage timing: seconds per stage over all steps, the timeline of one step, and the same in figures.

const MOVES = ['onload', 'offload'];
const WRITTEN = ['checkpoint', 'write_rollouts', 'checkpoint_snapshot', 'checkpoint_wait'];
/** Parts that move and files that are written are no stages: they keep the hues free for those. */
const hueOf = (names, name) => (MOVES.includes(name) ? name : WRITTEN.includes(name) ? 'written'
  : `hue${names.filter((each) => !MOVES.includes(each) && !WRITTEN.includes(each)).indexOf(name) % NUM_HUES}`);
const stepLabel = (step) => (step === null || step === 'null' ? 'outside steps' : `step ${step}`);

/** Each step a stacked bar; a click picks the nearest step that has a timeline. */
function stackedSteps(timing, pick) {
  const { steps, names } = timing;
  const height = 110;
  const totals = steps.map((_, i) => names.reduce((sum, name) => sum + timing.seconds[name][i], 0));
  const top = Math.max(...totals) || 1;
  const width = 1000 / steps.length;
  const gap = Math.min(2, width * 0.15);
  const marker = svg('rect', { class: 'picked', y: 1, height: height - 1, width });
  const bars = steps.map((step, i) => {
    let y = height;
    return names.map((name) => {
      const h = (timing.seconds[name][i] / top) * height;
      y -= h;
      return h > 0 && svg('rect', { class: hueOf(names, name), x: i * width + gap / 2, width: width - gap, y, height: h });
    });
  });
  const node = svg('svg', { viewBox: `0 0 1000 ${height}`, preserveAspectRatio: 'none', class: 'stack', role: 'img', 'aria-label': 'seconds per stage for every step' }, bars, marker);
  const index = (event) => {
    const box = node.getBoundingClientRect();
    return Math.min(steps.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * steps.length)));
  };
  node.addEventListener('click', (event) => pick(steps[index(event)]));
  node.addEventListener('pointermove', (event) => {
    const i = index(event);
    const rows = names.filter((name) => timing.seconds[name][i] > 0).map((name) => [name, seconds(timing.seconds[name][i])]);
    showTip(event, null, el('strong', null, stepLabel(steps[i])), tipTable([...rows, ['wall', seconds(timing.wall_s[i])]]));
  });
  node.addEventListener('pointerleave', hideTip);
  const mark = (step) => {
    const i = steps.findIndex((each) => String(each) === String(step));
    marker.setAttribute('x', i * width);
  };
  return {
    node: el('div', { class: 'stacked' }, el('div', { class: 'scale' }, el('span', null, seconds(top)), el('span', null, '0')), node,
      el('div', { class: 'ends' }, el('span', null, stepLabel(steps[0])), el('span', null, steps.length > 1 ? stepLabel(steps[steps.length - 1]) : ''))),
    mark,
  };
}

const tipTable = (rows) => el('table', null, rows.map(([name, value]) => el('tr', null, el('th', null, name), el('td', null, value))));

/** Puts overlapping spans of a lane below each other: `[row of each span]`. */
function stackRows(spans) {
  const ends = [];
  return spans.map((span) => {
    let row = ends.findIndex((end) => end <= span.start + 1e-9);
    if (row < 0) row = ends.length;
    ends[row] = span.end;
    return row;
  });
}

function spanTip(span) {
  const length = span.end - span.start;
  const rows = [['from', seconds(span.start)], ['to', seconds(span.end)], ['took', seconds(length)]];
  if (span.role) rows.push(['role', span.role]);
  if (span.mode) rows.push(['mode', span.mode]);
  if (span.chunk !== null) rows.push(['chunk', number(span.chunk)]);
  if (span.tokens) rows.push(['tokens', number(span.tokens)], ['tokens/s', length > 0 ? number(span.tokens / length, 3) : '—']);
  if (span.bytes) rows.push(['bytes', bytes(span.bytes)]);
  if (span.failed) rows.push(['', 'failed']);
  return [el('strong', null, span.name), tipTable(rows)];
}

/** Seconds of `[0, total]` in which at least one of the spans, given by their start, is open. */
function covered(spans, total) {
  let reached = 0;
  let sum = 0;
  for (const span of spans) {
    const end = Math.min(span.end, total);
    sum += Math.max(0, end - Math.max(span.start, reached));
    reached = Math.max(reached, end);
  }
  return sum;
}

/** A lane per role. What is written in the background may end after the step: it is cut off at the edge. */
function timeline(spans, names) {
  const own = spans.filter((span) => span.mode !== 'background');
  const total = Math.max(...(own.length ? own : spans).map((span) => span.end)) || 1;
  const lanes = new Map();
  for (const span of spans.filter((each) => each.start < total)) {
    const lane = span.role ?? span.name;
    lanes.set(lane, [...(lanes.get(lane) ?? []), span]);
  }
  const percent = (value) => `${((100 * value) / total).toFixed(3)}%`;
  const ticks = niceTicks(0, total, 6);
  return el('div', { class: 'gantt' },
    [...lanes].map(([lane, members]) => {
      const rows = stackRows(members);
      const busy = `${((100 * covered(members, total)) / total).toFixed(0)} %`;
      return el('div', { class: 'lane' }, el('div', { class: 'lane-name' }, lane, el('small', null, busy)),
        el('div', { class: 'track', style: { '--rows': String(Math.max(...rows) + 1) } },
          ticks.map((tick) => el('i', { style: { left: percent(tick) } })),
          members.map((span, i) => explained(el('div', {
            class: `span ${hueOf(names, span.name)}${span.failed ? ' failed' : ''}`, tabindex: '0',
            style: { left: percent(span.start), width: percent(Math.min(span.end, total) - span.start), '--row': String(rows[i]) },
          }, (span.end - span.start) / total > 0.09 ? span.name : ''), () => spanTip(span)))));
    }),
    el('div', { class: 'lane axis' }, el('div', { class: 'lane-name' }), el('div', { class: 'track' },
      ticks.filter((tick) => tick < total * 0.97).map((tick) => el('span', { style: { left: percent(tick) } }, seconds(tick))))));
}

function stageTable(timing, index) {
  const { names } = timing;
  const here = names.map((name) => timing.seconds[name][index]);
  const sum = here.reduce((a, b) => a + b, 0) || 1;
  const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
  const header = ['stage', 'seconds', 'share of work', 'median step', 'slowest step', 'tokens', 'tokens/s'];
  const rows = names.map((name, n) => {
    const tokens = timing.tokens[name][index];
    return el('tr', null,
      el('th', { scope: 'row' }, el('i', { class: `swatch ${hueOf(names, name)}` }), name),
      el('td', null, seconds(here[n])),
      el('td', null, el('div', { class: 'share' }, el('i', { class: hueOf(names, name), style: { width: `${(100 * here[n]) / sum}%` } }), el('span', null, `${((100 * here[n]) / sum).toFixed(0)} %`))),
      el('td', null, seconds(median(timing.seconds[name]))),
      el('td', null, seconds(Math.max(...timing.seconds[name]))),
      el('td', null, tokens ? number(tokens) : '—'),
      el('td', null, tokens && here[n] > 0 ? number(tokens / here[n], 3) : '—'));
  });
  return el('div', { class: 'scroll' }, el('table', { class: 'figures' },
    el('thead', null, el('tr', null, header.map((text) => el('th', { scope: 'col', class: text.startsWith('share') ? 'left' : null }, text)))), el('tbody', null, rows)));
}

/** The workers of stages that have several: who is slow, and how often the slowest. */
function workersTable(workers) {
  const header = ['stage', 'worker', 'median step', 'slowest step', 'slowest worker in'];
  const longest = Math.max(...workers.map((row) => row.median_s)) || 1;
  const rows = workers.map((row, i) => el('tr', null,
    el('th', { scope: 'row' }, workers[i - 1]?.stage === row.stage ? '' : row.stage), el('td', { class: 'left' }, row.worker),
    el('td', null, el('div', { class: 'share' }, el('i', { class: 'hue0', style: { width: `${(100 * row.median_s) / longest}%` } }), el('span', null, seconds(row.median_s)))),
    el('td', null, seconds(row.max_s)), el('td', null, `${number(row.slowest)} of ${number(row.steps)} steps`)));
  return el('div', { class: 'card scroll workers' }, el('h4', null, 'Workers'), el('table', { class: 'figures' },
    el('thead', null, el('tr', null, header.map((text) => el('th', { scope: 'col', class: ['worker', 'median step'].includes(text) ? 'left' : null }, text)))), el('tbody', null, rows)));
}

/** `memory` keeps the chosen step from one drawing to the next. */
function timingSection(stage, memory = {}) {
  const { timing } = stage;
  if (!timing) return missing('This stage has recorded no spans (spans.jsonl).');
  const detailed = Object.keys(timing.detail).sort((a, b) => (a === 'null' ? -1 : b === 'null' ? 1 : a - b));
  const facts = el('p', { class: 'facts' });
  const chart = el('div');
  const table = el('div');
  const view = stackedSteps(timing, (step) => { const key = nearestKey(step); picker.set(key); choose(key); });
  const nearestKey = (step) => (step === null || detailed.length === 1 ? detailed[0] : nearest(detailed.filter((key) => key !== 'null'), step));
  // The last step may have been cut off, or begun ahead of its time: the last one with all its lanes is shown first.
  const lanes = (key) => new Set(timing.detail[key].map((span) => span.role ?? span.name)).size;
  const most = Math.max(...detailed.map(lanes));
  const shown = detailed.includes(memory.step) ? memory.step : detailed.filter((key) => lanes(key) === most).pop();
  const choose = (key) => { memory.step = key; show(key); };
  const picker = stepper('step', detailed.map((key) => [key, stepLabel(key)]), shown, choose);

  function show(key) {
    const index = timing.steps.findIndex((step) => String(step) === key);
    const work = timing.names.reduce((sum, name) => sum + timing.seconds[name][index], 0);
    const wall = timing.wall_s[index];
    const busy = timing.busy_s[index];
    clear(facts, el('b', null, seconds(wall)), ' of wall time, ', el('b', null, seconds(work)), ' of work, ',
      el('b', null, seconds(Math.max(0, work - busy))), ' of it overlapped, ', el('b', null, seconds(Math.max(0, wall - busy))), ' with nothing running');
    clear(chart, timeline(timing.detail[key], timing.names));
    clear(table, stageTable(timing, index));
    view.mark(key);
  }
  show(shown);
  return el('div', null,
    timing.steps.length > 1 && el('div', { class: 'card' }, el('h4', null, 'Work per step'), view.node),
    el('div', { class: 'card' }, el('div', { class: 'toolbar' }, el('h4', null, 'Timeline'), picker, facts), chart, table),
    timing.workers.length > 0 && workersTable(timing.workers));
}
