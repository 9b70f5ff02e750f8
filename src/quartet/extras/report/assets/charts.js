// One small line chart: a line per run, raw values, optionally a smoothed line over them, markers where a value was not finite.

const CHART = { width: 340, height: 150, left: 46, right: 10, top: 10, bottom: 22 };

function niceTicks(low, high, count = 4) {
  const span = high - low;
  const raw = span / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 2.5, 5, 10].find((u) => u * power >= raw * 0.999) * power;
  const ticks = [];
  for (let i = Math.ceil(low / unit - 1e-9); i * unit <= high + 1e-9 * span; i += 1) ticks.push(i * unit);
  return ticks;
}

function valueRange(values) {
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (!values.length || (low === 0 && high === 0)) return [0, 1];
  if (low === high) {
    const pad = Math.abs(low) * 0.1;
    return [low - pad, high + pad];
  }
  const pad = (high - low) * 0.06;
  return [low - pad, high + pad];
}

/** Exponential moving average that starts unbiased. */
function smooth(points, weight) {
  let mean = 0;
  let norm = 0;
  return points.map(([x, y]) => {
    mean = weight * mean + (1 - weight) * y;
    norm = weight * norm + (1 - weight);
    return [x, mean / norm];
  });
}

const tickLabel = (value, unit) => (unit === 'fraction' ? `${number(value * 100, 3)}%`
  : unit === 'bytes' ? bytes(value)
    : Math.abs(value) >= 1e4 ? Intl.NumberFormat('en', { notation: 'compact', maximumSignificantDigits: 3 }).format(value)
      : number(value, 3));

function linePath(points) {
  return points.map(([x, y], i) => `${i ? 'L' : 'M'}${x.toFixed(1)},${y.toFixed(1)}`).join('');
}

/** One line: its path, the raw values behind a smoothed one, dots where there are few, crosses where a value was not finite. */
function drawnLine({ steps, series, hue }, X, Y, floor, smoothing) {
  const known = steps.map((step, i) => [step, series[i]]).filter(([, y]) => finite(y));
  const broken = steps.filter((_, i) => typeof series[i] === 'string');
  const raw = known.map(([x, y]) => [X(x), Y(y)]);
  const shown = smoothing ? smooth(known, smoothing).map(([x, y]) => [X(x), Y(y)]) : raw;
  return svg('g', { class: hue === undefined ? null : `run${hue % NUM_HUES}` },
    hue === undefined && shown.length > 1 && svg('path', { class: 'area', d: `${linePath(shown)}L${shown[shown.length - 1][0].toFixed(1)},${floor}L${shown[0][0].toFixed(1)},${floor}Z` }),
    smoothing > 0 && svg('path', { class: 'raw', d: linePath(raw) }),
    shown.length > 1 && svg('path', { class: 'line', d: linePath(shown) }),
    shown.length <= 24 && shown.map(([x, y]) => svg('circle', { class: 'dot', cx: x, cy: y, r: shown.length > 1 ? 1.8 : 3 })),
    broken.map((step) => svg('g', { class: 'broken' }, svg('line', { x1: X(step), x2: X(step), y1: CHART.top, y2: floor }),
      svg('text', { x: X(step), y: floor - 3, 'text-anchor': 'middle' }, '✕'))));
}

/**
 * Draws lines (`steps`, `series`, and where there are several runs a `hue`) over the same axes into an svg.
 * Returns the node and `mark(step)`, which moves the crosshair (null: away) and returns each line's value there, or undefined.
 */
function lineChart(lines, { unit, smoothing, label }) {
  const inner = { w: CHART.width - CHART.left - CHART.right, h: CHART.height - CHART.top - CHART.bottom };
  const [low, high] = valueRange(lines.flatMap((line) => line.series.filter(finite)));
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const first = steps[0];
  const last = steps[steps.length - 1];
  const X = (step) => CHART.left + (last === first ? 0.5 : (step - first) / (last - first)) * inner.w;
  const Y = (value) => CHART.top + (1 - (value - low) / (high - low)) * inner.h;
  const floor = CHART.top + inner.h;
  const cross = svg('g', { class: 'cross', visibility: 'hidden' });
  const node = svg('svg', { viewBox: `0 0 ${CHART.width} ${CHART.height}`, class: 'chart', role: 'img', 'aria-label': label },
    niceTicks(low, high).map((tick) => svg('g', { class: 'tick' },
      svg('line', { x1: CHART.left, x2: CHART.width - CHART.right, y1: Y(tick), y2: Y(tick) }),
      svg('text', { x: CHART.left - 6, y: Y(tick) + 3.5, 'text-anchor': 'end' }, tickLabel(tick, unit)))),
    svg('text', { x: X(first), y: CHART.height - 6, 'text-anchor': last === first ? 'middle' : 'start', class: 'axis' }, `step ${number(first)}`),
    last !== first && svg('text', { x: X(last), y: CHART.height - 6, 'text-anchor': 'end', class: 'axis' }, number(last)),
    lines.map((line) => drawnLine(line, X, Y, floor, smoothing)),
    cross);

  function mark(step) {
    const values = lines.map((line) => (step === null ? undefined : line.series[line.steps.indexOf(step)]));
    const isKnown = values.some((value) => value !== undefined);
    cross.setAttribute('visibility', isKnown ? 'visible' : 'hidden');
    if (isKnown) {
      clear(cross, svg('line', { x1: X(step), x2: X(step), y1: CHART.top, y2: floor }),
        values.map((value, i) => finite(value) && svg('circle', { class: lines[i].hue === undefined ? null : `run${lines[i].hue % NUM_HUES}`, cx: X(step), cy: Y(value), r: 3.2 })));
    }
    return values;
  }

  function stepAt(event) {
    const box = node.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * CHART.width;
    return nearest(steps, first + ((x - CHART.left) / inner.w) * (last - first));
  }
  return { node, mark, stepAt };
}
