// Small tools for everything else: elements, numbers, the tooltip.
// Data reaches the page only as text nodes and attribute values, never as markup.

const root = document.documentElement;
window.addEventListener('error', (event) => {
  root.dataset.error = `${root.dataset.error ?? ''}${event.message}\n`;
});
window.addEventListener('securitypolicyviolation', (event) => {
  root.dataset.error = `${root.dataset.error ?? ''}blocked: ${event.violatedDirective}\n`;
});

window.addEventListener('unhandledrejection', (event) => {
  root.dataset.error = `${root.dataset.error ?? ''}${event.reason}\n`;
});

const NUM_HUES = 10;
const SVG = 'http://www.w3.org/2000/svg';

// Foreign text must not reorder or hide what stands beside it: directions, controls and invisible characters are written
// out. Line feeds, tabs and joiners stay; the token viewer has signs of its own for many.
const UNSAFE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}\ud800-\udfff]/gu;
const printable = (text) => text.replace(UNSAFE, (char) => `⟨U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, '0')}⟩`);
const READ = new Set(['title', 'aria-label']);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'style') for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else node.setAttribute(name, value === true ? '' : READ.has(name) ? printable(String(value)) : value);
  }
  const kept = children.flat(2).filter((child) => child !== null && child !== undefined && child !== false);
  node.append(...kept.map((child) => (typeof child === 'string' ? printable(child) : child)));
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const clear = (node, ...children) => { node.replaceChildren(); return fill(node, null, children); };

const finite = (value) => typeof value === 'number';

/** A number in few characters; NaN and infinities arrive as text and stay text. */
function number(value, digits = 4) {
  if (value === null || value === undefined) return '—';
  if (!finite(value)) return { nan: 'NaN', inf: '∞', '-inf': '−∞' }[value] ?? String(value);
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return value.toLocaleString('en').replace('-', '−');
  if (size >= 1e7 || size < 1e-3) return value.toExponential(Math.max(0, digits - 2)).replace('e+', 'e').replaceAll('-', '−');
  return value.toLocaleString('en', { maximumSignificantDigits: digits }).replace('-', '−');
}

/** A number as its unit is read: fractions as per cent, seconds and bytes in handy multiples. */
function withUnit(value, unit, digits = 4) {
  if (!finite(value)) return number(value);
  if (unit === 'fraction') return `${(100 * value).toFixed(1).replace('-', '−')} %`;
  if (unit === 's') return seconds(value);
  if (unit === 'bytes') return bytes(value);
  return number(value, digits);
}

/** A score with two decimals, so that a column of them can be compared at a glance. */
function scoreText(value) {
  if (value === null || value === undefined) return 'n/a';
  return finite(value) && Math.abs(value) < 1000 ? value.toFixed(2).replace('-', '−') : number(value);
}

function seconds(value) {
  if (!finite(value)) return number(value);
  if (value >= 5400) return `${(value / 3600).toFixed(1)} h`;
  if (value >= 100) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (value >= 1) return `${number(value, 3)} s`;
  if (value >= 1e-3) return `${number(value * 1e3, 3)} ms`;
  return value === 0 ? '0 s' : `${number(value * 1e6, 3)} µs`;
}

function bytes(value) {
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let power = 0;
  while (value >= 1000 && power < units.length - 1) { value /= 1000; power += 1; }
  return `${number(value, 3)} ${units[power]}`;
}

const tooltip = document.getElementById('tooltip');

/** Shows `children` beside the pointer (or beside `anchor`, for the keyboard). */
function showTip(event, anchor, ...children) {
  clear(tooltip, ...children);
  tooltip.hidden = false;
  const box = tooltip.getBoundingClientRect();
  const at = anchor ? anchor.getBoundingClientRect() : { left: event.clientX, right: event.clientX, bottom: event.clientY + 6, top: event.clientY - 6 };
  const left = Math.min(Math.max(8, anchor ? at.left : at.left + 12), window.innerWidth - box.width - 8);
  const below = at.bottom + 8;
  const top = below + box.height > window.innerHeight ? Math.max(8, at.top - box.height - 8) : below;
  tooltip.style.left = `${left}px`;
  tooltip.style.top = `${top}px`;
}

const hideTip = () => { tooltip.hidden = true; };

/** An explanation that appears on hover and on keyboard focus. */
function explained(node, ...children) {
  node.addEventListener('pointerenter', (event) => showTip(event, node, ...children()));
  node.addEventListener('pointerleave', hideTip);
  node.addEventListener('focus', (event) => showTip(event, node, ...children()));
  node.addEventListener('blur', hideTip);
  return node;
}

function select(label, options, value, onchange) {
  const control = el('select', { 'aria-label': label, onchange: () => onchange(control.value) },
    options.map(([key, text, disabled]) => el('option', { value: key, disabled: disabled || null }, text)));
  control.value = value;
  return el('label', { class: 'field' }, el('span', null, label), control);
}

/** Previous, a list, next. */
function stepper(label, options, value, onchange) {
  const keys = options.map(([key]) => key);
  const field = select(label, options, value, (key) => { update(key); onchange(key); });
  const control = field.querySelector('select');
  const move = (by) => {
    const next = keys[keys.indexOf(control.value) + by];
    if (next !== undefined) { control.value = next; update(next); onchange(next); }
  };
  const back = el('button', { class: 'round', type: 'button', title: `previous ${label}`, onclick: () => move(-1) }, '‹');
  const forth = el('button', { class: 'round', type: 'button', title: `next ${label}`, onclick: () => move(1) }, '›');
  function update(key) {
    back.disabled = keys.indexOf(key) <= 0;
    forth.disabled = keys.indexOf(key) >= keys.length - 1;
  }
  update(value);
  field.append(back, forth);
  field.set = (key) => { control.value = key; update(key); };
  return field;
}

const missing = (text) => el('p', { class: 'missing' }, text);
const note = (text) => (text ? el('p', { class: 'note' }, text) : null);

/** The key nearest to `step` among textual or numeric steps. */
function nearest(keys, step) {
  return keys.reduce((best, key) => (Math.abs(key - step) < Math.abs(best - step) ? key : best), keys[0]);
}
