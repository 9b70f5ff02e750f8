// The token viewer: one response with its tokens coloured, its group beside it, its prompt at other steps.

const CONTROL = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/gu;

/** Text of a token with everything invisible made visible; text that reorders its surroundings cannot. */
function visible(piece, spaces) {
  const shown = piece.replace(CONTROL, (char) => {
    if (char === '\n') return '↵\n';
    if (char === '\t') return '⇥';
    const code = char.codePointAt(0);
    return code < 160 ? `\\x${code.toString(16).padStart(2, '0')}` : `⟨U+${code.toString(16).toUpperCase().padStart(4, '0')}⟩`;
  });
  return shown === '' ? '∅' : spaces ? shown.replaceAll(' ', '·') : shown;
}

const PICTURES = {};

/** Takes in pictures by their keys; a picture that one run has lost another may have. */
const keepPictures = (found) => { for (const [key, url] of Object.entries(found)) PICTURES[key] ??= url; };

/** A picture as it is shown in place of its tokens; a box with its key where it is gone. */
function picture(key) {
  const name = { class: 'picture', title: `picture ${key}` };
  return PICTURES[key] ? el('img', { ...name, src: PICTURES[key], alt: name.title }) : el('span', name, `picture ${key} is not here`);
}

/** What is shown of token `i` of a prompt or a sample: a picture has its key in place of an id. */
const shownToken = ({ tokens, ids }, i, spaces) => (typeof ids?.[i] === 'string' ? picture(ids[i]) : visible(tokens[i], spaces));

const promptText = (prompt, spaces) => el('div', { class: 'tokens prompt' }, prompt.tokens.map((_, i) => el('span', { class: 'token' }, shownToken(prompt, i, spaces))));

/** The prompt's first pictures, small. */
const smallPictures = (prompt) => (prompt.ids ?? []).filter((id) => typeof id === 'string').slice(0, 4).map(picture);

function tokenTip(sample, i, quantityKey) {
  const masked = isMasked(sample)(i);
  const observed = isObserved(sample)(i);
  const rows = Object.entries(QUANTITIES)
    .map(([key, quantity]) => [key, quantity.label, quantity.read(sample)])
    .filter(([, , read]) => read)
    .map(([key, label, read]) => el('tr', { class: key === quantityKey ? 'chosen' : null }, el('th', null, label), el('td', null, number(read(i)))));
  const covered = new Set(['loss_mask', 'observation_mask', ...Object.values(QUANTITIES).map((quantity) => quantity.name)]);
  const raw = Object.keys(sample.columns).filter((name) => !covered.has(name)).sort().map((name) => el('tr', null, el('th', null, name), el('td', null, number(column(sample, name)(i)))));
  return [
    el('strong', { class: 'piece' }, JSON.stringify(sample.tokens[i])),
    el('span', { class: 'unit' }, `token ${i + 1} of ${number(sample.length)} · id ${sample.ids[i]}${observed ? ' · observation, not emitted by the policy' : masked ? ' · not trained on' : ''}`),
    el('table', null, rows), raw.length > 0 && el('table', { class: 'raw-columns' }, raw),
  ];
}

/** The coloured tokens of a sample. `onhover(i)` hears which token is pointed at (null: none). */
function tokenText(sample, quantityKey, scale, { spaces = false, onhover = () => {}, keyboard = false } = {}) {
  const read = QUANTITIES[quantityKey].read(sample);
  const masked = isMasked(sample);
  const observed = isObserved(sample);
  const nodes = sample.tokens.map((_, i) => {
    const node = el('span', { class: `token${observed(i) ? ' observed' : masked(i) ? ' masked' : ''}`, tabindex: keyboard ? (i ? '-1' : '0') : null }, shownToken(sample, i, spaces));
    if (read && !masked(i)) paint(node, scale.at(read(i)));
    return node;
  });
  const box = el('div', { class: 'tokens', dir: 'ltr' }, nodes);
  const enter = (event, anchor) => {
    const i = nodes.indexOf(event.target);
    if (i < 0) return;
    showTip(event, anchor ? event.target : null, ...tokenTip(sample, i, quantityKey));
    onhover(i);
  };
  const leave = () => { hideTip(); onhover(null); };
  box.addEventListener('pointerover', (event) => enter(event, true));
  box.addEventListener('pointerleave', leave);
  if (keyboard) {
    box.addEventListener('focusin', (event) => enter(event, true));
    box.addEventListener('focusout', leave);
    box.addEventListener('keydown', (event) => {
      const next = nodes[nodes.indexOf(document.activeElement) + ({ ArrowRight: 1, ArrowLeft: -1 }[event.key] ?? 0)];
      if (next && next !== document.activeElement) { event.preventDefault(); next.focus(); }
    });
  }
  if (sample.length > sample.tokens.length) box.append(el('span', { class: 'cut' }, ` … ${number(sample.length - sample.tokens.length)} more tokens`));
  return { node: box, nodes };
}

/** A bar per token above the text, on the same scale. */
function tokenBars(sample, quantityKey, scale) {
  const read = QUANTITIES[quantityKey].read(sample);
  if (!read || sample.tokens.length < 2) return { node: null, mark: () => {} };
  const masked = isMasked(sample);
  const width = 1000 / sample.tokens.length;
  const middle = scale.oneSided ? 56 : 30;
  const reach = scale.oneSided ? 52 : 27;
  const bars = sample.tokens.map((_, i) => {
    const place = scale.at(read(i));
    const h = Math.max(0.8, Math.abs(place ?? 0) * reach);
    return svg('rect', { class: masked(i) ? 'masked' : place === null ? 'odd' : place < 0 ? 'neg' : 'pos', x: i * width + width * 0.08, width: width * 0.84, y: place < 0 ? middle : middle - h, height: h });
  });
  const node = svg('svg', { class: 'bars', viewBox: '0 0 1000 60', preserveAspectRatio: 'none', 'aria-hidden': 'true', style: { 'max-width': `${22 * sample.tokens.length}px` } },
    svg('line', { x1: 0, x2: 1000, y1: middle, y2: middle }), bars);
  return { node, mark: (at) => bars.forEach((bar, i) => bar.classList.toggle('here', i === at)), index: (event) => {
    const box = node.getBoundingClientRect();
    return Math.max(0, Math.min(sample.tokens.length - 1, Math.floor(((event.clientX - box.left) / box.width) * sample.tokens.length)));
  } };
}

const scoreChip = (score, label = null) => el('span', { class: 'chip score', title: 'score' }, label && el('small', null, label), scoreText(score));

function sampleFacts(sample) {
  const rewards = Object.entries(sample.rewards).map(([name, value]) => el('span', { class: 'chip' }, el('small', null, name), scoreText(value)));
  const fact = (name, value) => el('span', { class: 'chip' }, el('small', null, name), value);
  const turns = sample.trajectory !== sample.id && `sequence ${sample.part + 1} of trajectory ${sample.trajectory}`;
  const names = [`sequence ${sample.id}`, `group ${sample.group}`, `response ${sample.index}`, turns];
  return el('div', { class: 'chips' }, scoreChip(sample.score, 'score'), rewards, fact('ended by', sample.finish), fact('tokens', number(sample.length)),
    fact('policy version', number(sample.version)),
    sample.repetition > 0.1 && fact('repeated', withUnit(sample.repetition, 'fraction')), el('span', { class: 'names' }, names.filter(Boolean).join(' · ')));
}

/** Short texts go into narrower cards. */
const isShort = (samples) => (samples.every((sample) => sample.length < 80) ? ' short' : '');

class TokenViewer {
  /** `live`: a page that follows a run shows the newest step until another one is chosen. */
  constructor(rollouts, state, remember, live = false) {
    this.rollouts = rollouts;
    keepPictures(rollouts.pictures);
    this.remember = remember;
    this.memory = {};
    this.steps = rollouts.steps.map(String);
    this.step = this.steps.includes(state.step) ? state.step : this.steps[this.steps.length - 1];
    this.available = this.recorded();
    this.quantity = this.available.includes(state.colour) ? state.colour : this.available[0] ?? 'advantage';
    this.scope = 'step';
    this.order = 'prompt';
    this.spaces = false;
    this.chosen = Math.min(Number(state.sample) || 0, this.samples().length - 1);
    this.list = el('div', { class: 'samples', role: 'listbox', 'aria-label': 'samples of the step' });
    this.main = el('div', { class: 'sample' });
    this.legendBox = el('div');
    this.picker = this.stepPicker();
    this.following = live && el('input', { type: 'checkbox', checked: !state.step, onchange: () => this.added() });
    const colours = Object.entries(QUANTITIES).map(([key, { label }]) => [key, this.available.includes(key) ? label : `${label} (not recorded)`, !this.available.includes(key)]);
    const spaces = el('input', { type: 'checkbox', onchange: () => { this.spaces = spaces.checked; this.draw(); } });
    this.node = el('div', { class: 'card viewer' },
      el('div', { class: 'toolbar' }, this.picker,
        select('colour by', colours, this.quantity, (key) => { this.quantity = key; this.draw(); }),
        select('scale of', [['step', 'the whole step'], ['sample', 'this sample']], this.scope, (scope) => { this.scope = scope; this.draw(); }),
        select('order', [['prompt', 'prompt'], ['high', 'best score first'], ['low', 'worst score first'], ['loops', 'most repetition first']], this.order, (order) => { this.order = order; this.drawList(); }),
        el('label', { class: 'field' }, spaces, el('span', null, 'show spaces')),
        this.following && el('label', { class: 'field' }, this.following, el('span', null, 'follow the newest step'))),
      this.legendBox,
      el('div', { class: 'panes' }, this.list, this.main));
    const token = Number(state.token); // before drawing, which forgets it
    this.draw();
    if (token >= 1 && token <= this.samples()[this.chosen].tokens.length) this.replay.show(Math.floor(token));
  }

  samples(step = this.step) { return this.rollouts.samples[step]; }

  allSamples() { return Object.values(this.rollouts.samples).flat(); }

  recorded() { return Object.keys(QUANTITIES).filter((key) => this.allSamples().some((sample) => QUANTITIES[key].read(sample))); }

  stepPicker() { return stepper('step', this.steps.map((step) => [step, step]), this.step, (step) => this.openStep(step)); }

  stay() { if (this.following) this.following.checked = false; }

  /** More steps are there; what is being read or replayed stays in view. */
  added() {
    keepPictures(this.rollouts.pictures);
    this.steps = this.rollouts.steps.map(String);
    this.available = this.recorded();
    const picker = this.stepPicker();
    this.picker.replaceWith(picker);
    this.picker = picker;
    if (!this.samples() || (this.following?.checked && !this.replay?.isOn())) this.showStep(this.steps[this.steps.length - 1]);
  }

  openStep(step) { this.stay(); this.showStep(step); }

  showStep(step) {
    const before = this.samples()?.[this.chosen]; // a page that follows a run lets go of old steps
    this.step = String(step);
    const same = this.samples().findIndex((sample) => sample.prompt === before?.prompt);
    this.chosen = Math.max(0, same); // stay with the prompt where the step has it
    this.picker.set(this.step);
    this.draw();
  }

  choose(index) { this.stay(); this.chosen = index; this.draw(); }

  draw() {
    const sample = this.samples()[this.chosen];
    this.scale = colourScale(QUANTITIES[this.quantity], this.scope === 'step' ? this.samples() : [sample]);
    this.remember({ step: this.following?.checked ? '' : this.step, sample: String(this.chosen), colour: this.quantity, token: '' });
    clear(this.legendBox, legend(QUANTITIES[this.quantity], this.scale, this.samples().some(hasObservations)));
    this.drawList();
    this.drawSample(sample);
  }

  ordered() {
    const indices = this.samples().map((_, i) => i);
    const score = (i) => (finite(this.samples()[i].score) ? this.samples()[i].score : -Infinity);
    if (this.order === 'high') indices.sort((a, b) => score(b) - score(a));
    if (this.order === 'low') indices.sort((a, b) => score(a) - score(b));
    if (this.order === 'loops') indices.sort((a, b) => this.samples()[b].repetition - this.samples()[a].repetition);
    return indices;
  }

  drawList() {
    const samples = this.samples();
    const scores = samples.map((sample) => sample.score).filter(finite);
    const [low, high] = [Math.min(...scores), Math.max(...scores)];
    const left = (score) => `${high > low ? (100 * (score - low)) / (high - low) : 50}%`;
    let group = null;
    const rows = this.ordered().flatMap((i) => {
      const sample = samples[i];
      const heading = this.order === 'prompt' && sample.group !== group && el('div', { class: 'prompt-heading', dir: 'auto' }, smallPictures(this.rollouts.prompts[sample.prompt]), this.rollouts.prompts[sample.prompt].text.slice(-90));
      group = sample.group;
      return [heading, el('button', { class: 'row', type: 'button', role: 'option', 'aria-selected': String(i === this.chosen), onclick: () => this.choose(i) },
        el('span', { class: 'row-score' }, scoreText(sample.score)),
        el('span', { class: 'gauge' }, finite(sample.score) && el('i', { style: { left: left(sample.score) } })),
        el('span', { class: 'row-text' }, sample.part ? '↳ ' : '', visible(sample.tokens.slice(0, 40).join('').slice(0, 80)).replaceAll('\n', ' ')))];
    });
    const total = this.rollouts.counts[this.step];
    clear(this.list, el('div', { class: 'list-head' }, `${new Set(samples.map((sample) => sample.trajectory)).size} of ${number(total)} responses`), el('div', { class: 'list-body' }, rows));
    const current = this.list.querySelector('[aria-selected="true"]');
    if (current) current.parentElement.scrollTop = Math.max(0, current.offsetTop - current.parentElement.clientHeight / 2);
  }

  drawSample(sample) {
    const prompt = this.rollouts.prompts[sample.prompt];
    const bars = tokenBars(sample, this.quantity, this.scale);
    const text = tokenText(sample, this.quantity, this.scale, { spaces: this.spaces, onhover: (i) => bars.mark(i), keyboard: true });
    if (bars.node) {
      bars.node.addEventListener('pointermove', (event) => {
        const i = bars.index(event);
        bars.mark(i);
        showTip(event, null, ...tokenTip(sample, i, this.quantity));
      });
      bars.node.addEventListener('pointerleave', () => { bars.mark(null); hideTip(); });
    }
    const group = this.samples().filter((other) => other.group === sample.group);
    const parts = group.filter((other) => other.trajectory === sample.trajectory);
    this.replay?.stop();
    this.replay = replay(sample, text.nodes, { mark: (i) => { bars.mark(i); this.remember({ token: i === null ? '' : String(i + 1) }); }, memory: this.memory, ended: () => {
      const next = parts[parts.indexOf(sample) + 1];
      if (next) { this.choose(this.samples().indexOf(next)); this.replay.play(); }
    } });
    const [heading, what] = hasObservations(sample) ? ['Turns', 'underlined: what the environment answered; '] : ['Response', ''];
    clear(this.main, sampleFacts(sample),
      el('h5', null, 'Prompt', el('small', null, `${number(prompt.length)} tokens`)),
      promptText(prompt, this.spaces),
      el('h5', null, heading, el('small', null, `${what}hover a token for its numbers, or use the arrow keys`)), this.replay.node, bars.node, text.node,
      parts.length > 1 && [el('h5', null, 'The trajectory', el('small', null, 'its sequences in order: the state was rewritten between them')), this.groupCards(parts, sample, true)],
      group.length > 1 && [el('h5', null, 'The group', el('small', null, 'all responses to this prompt in this step')), this.groupCards(group, sample)],
      this.historySection(sample));
  }

  groupCards(group, current, withState = false) {
    return el('div', { class: `siblings${isShort(group)}` }, group.map((sample) => el('article', { class: `sibling${sample === current ? ' current' : ''}` },
      el('header', null, withState ? el('b', null, `sequence ${sample.part + 1}`) : scoreChip(sample.score), el('span', { class: 'dim' }, sample.finish === 'stop' ? `${number(sample.length)} tokens` : sample.finish),
        sample !== current && el('button', { class: 'link', type: 'button', onclick: () => this.choose(this.samples().indexOf(sample)) }, 'open')),
      withState && el('div', { class: 'state', dir: 'auto' }, smallPictures(this.rollouts.prompts[sample.prompt]), visible(this.rollouts.prompts[sample.prompt].text.slice(-300), this.spaces)),
      tokenText(sample, this.quantity, this.scale, { spaces: this.spaces }).node)));
  }

  /** The same prompt at every step that has it: coloured as this one is. */
  historySection(sample) {
    const cards = [];
    for (const step of this.steps) {
      const found = this.samples(step).filter((other) => other.prompt === sample.prompt);
      const match = found.find((other) => other.index === sample.index) ?? found[0];
      if (!match || (step === this.step)) continue;
      const scores = found.map((other) => other.score).filter(finite);
      const mean = scores.length ? scores.reduce((a, b) => a + b, 0) / scores.length : null;
      cards.push(el('article', { class: 'sibling' }, el('header', null, el('b', null, `step ${step}`), scoreChip(match.score),
        found.length > 1 && el('span', { class: 'dim', title: `mean score of the ${found.length} responses` }, `⌀ ${scoreText(mean)}`),
        el('button', { class: 'link', type: 'button', onclick: () => { this.openStep(step); this.choose(this.samples().indexOf(match)); } }, 'open')),
      tokenText(match, this.quantity, this.scale, { spaces: this.spaces }).node));
    }
    const heading = el('h5', null, 'The same prompt at other steps');
    if (!cards.length) return [heading, missing('No other step of this page holds this prompt.')];
    return [heading, el('div', { class: `siblings${isShort([sample])}` }, cards)];
  }
}
