// What a token can be coloured by, and the diverging scale for it.

/** Reads a column of a sample: `(i) => value`, or null where the run did not record it. */
function column(sample, name) {
  const values = sample.columns[name];
  if (values === undefined) return null;
  return Array.isArray(values) ? (i) => values[i] : () => values;
}

function difference(sample, left, right) {
  const [a, b] = [column(sample, left), column(sample, right)];
  return a && b && ((i) => (finite(a(i)) && finite(b(i)) ? a(i) - b(i) : null));
}

/** A step's score on the token that ends it, by the run's first process reward model. */
function stepScore(sample) {
  const name = Object.keys(sample.columns).find((key) => key.startsWith('step_score/'));
  return name === undefined ? null : column(sample, name);
}

const negated = (read) => read && ((i) => (finite(read(i)) ? -read(i) : null));

/** label, its column where it is one, how to read it, the neutral value, and what the two ends of the scale mean */
const QUANTITIES = {
  advantage: { label: 'advantage', name: 'advantages', read: (s) => column(s, 'advantages'), ends: ['worse than expected', 'better than expected'] },
  kl: { label: 'KL to the reference', name: 'kl', read: (s) => column(s, 'kl') ?? difference(s, 'old_logprobs', 'ref_logprobs'), ends: ['reference likes it more', 'policy likes it more'] },
  value: { label: 'value', name: 'values', read: (s) => column(s, 'values'), centre: 'median', ends: ['low', 'high'] },
  ratio: { label: 'ratio', name: 'ratio', read: (s) => column(s, 'ratio'), centre: 1, log: true, ends: ['became less likely', 'became more likely'] },
  reward: { label: 'reward', name: 'token_rewards', read: (s) => column(s, 'token_rewards'), ends: ['penalty', 'reward'] },
  step: { label: 'score of the step', read: stepScore, centre: 'median', ends: ['wrong step', 'right step'] },
  logprob_diff: { label: 'trainer − sampler log-prob.', read: (s) => difference(s, 'old_logprobs', 'rollout_logprobs'), ends: ['sampler higher', 'trainer higher'] },
  surprise: { label: 'surprise (−log-prob.)', read: (s) => negated(column(s, 'old_logprobs') ?? column(s, 'rollout_logprobs')), ends: ['', 'unexpected'] },
  critic_error: { label: 'return − value', read: (s) => difference(s, 'returns', 'values'), ends: ['critic too high', 'critic too low'] },
};

const isMasked = (sample) => { const mask = column(sample, 'loss_mask'); return (i) => mask !== null && mask(i) === 0; };

/** Tokens that an environment put there: the policy read them and did not emit them. */
const isObserved = (sample) => { const mask = column(sample, 'observation_mask'); return (i) => mask !== null && mask(i) === 1; };
const hasObservations = (sample) => sample.tokens.some((_, i) => isObserved(sample)(i));

/** The transformed value that the scale is linear in. */
const onScale = (quantity, value) => (quantity.log ? (value > 0 ? Math.log(value) : null) : value);

function population(quantity, samples) {
  const found = [];
  for (const sample of samples) {
    const read = quantity.read(sample);
    const masked = isMasked(sample);
    for (let i = 0; read && i < sample.tokens.length; i += 1) {
      const value = read(i);
      const scaled = finite(value) && !masked(i) ? onScale(quantity, value) : null;
      if (scaled !== null) found.push(scaled);
    }
  }
  return found;
}

/** A scale over `samples`: neutral value, reach (98th percentile of the distance from it), and `at(value)` in −1…1. */
function colourScale(quantity, samples) {
  const values = population(quantity, samples).sort((a, b) => a - b);
  const middle = values.length ? values[Math.floor(values.length / 2)] : 0;
  const centre = quantity.centre === 'median' ? middle : onScale(quantity, quantity.centre ?? 0);
  const distances = values.map((value) => Math.abs(value - centre)).sort((a, b) => a - b);
  const reach = distances[Math.min(distances.length - 1, Math.floor(distances.length * 0.98))] || distances[distances.length - 1] || 1;
  const back = (scaled) => (quantity.log ? Math.exp(scaled) : scaled);
  return {
    low: back(centre - reach), neutral: back(centre), high: back(centre + reach), oneSided: values.length > 0 && values[0] >= centre,
    at(value) {
      const scaled = finite(value) ? onScale(quantity, value) : null;
      return scaled === null ? null : Math.max(-1, Math.min(1, (scaled - centre) / reach));
    },
  };
}

/** Colours a node by a place on the scale (null: not a number, which shows as a hatch). */
function paint(node, place) {
  node.classList.remove('pos', 'neg', 'odd');
  if (place === null) { node.classList.add('odd'); return; }
  node.classList.add(place < 0 ? 'neg' : 'pos');
  node.style.setProperty('--t', `${Math.round(Math.abs(place) ** 0.75 * 80)}%`);
}

function legend(quantity, scale, observed = false) {
  return el('div', { class: 'legend' },
    !scale.oneSided && el('span', { class: 'end' }, quantity.ends[0]),
    el('div', { class: 'ramp' }, el('div', { class: `bar${scale.oneSided ? ' half' : ''}` }),
      el('div', { class: 'marks' }, !scale.oneSided && el('span', null, `≤ ${number(scale.low, 3)}`), el('span', null, number(scale.neutral, 3)), el('span', null, `≥ ${number(scale.high, 3)}`))),
    el('span', { class: 'end' }, quantity.ends[1]),
    el('span', { class: 'end masked-key' }, el('span', { class: 'token masked' }, 'abc'), 'not trained on'),
    observed && el('span', { class: 'end masked-key' }, el('span', { class: 'token observed' }, 'abc'), 'observation: read, not emitted'));
}
