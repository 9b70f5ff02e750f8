// A response token by token, as it was sampled: plays, steps and jumps, and reads out what is known of each token.

const SPEEDS = [['4', '4 tokens/s'], ['12', '12 tokens/s'], ['40', '40 tokens/s']];

/** What a replay reads out of token `i`; nothing for what the run did not record. */
function readings(sample, i) {
  const of = (name) => column(sample, name)?.(i);
  const logprob = of('rollout_logprobs') ?? of('old_logprobs');
  const rewards = column(sample, 'token_rewards');
  const far = rewards && sample.tokens.slice(0, i + 1).reduce((sum, _, k) => sum + (finite(rewards(k)) ? rewards(k) : 0), 0);
  const facts = [['log-prob.', logprob], ['probability', finite(logprob) ? withUnit(Math.exp(logprob), 'fraction') : undefined],
    ['reward', of('token_rewards')], ['reward so far', far ?? undefined], ['advantage', of('advantages')], ['value', of('values')]];
  return facts.filter(([, value]) => value !== undefined).map(([name, value]) => [name, typeof value === 'string' ? value : number(value, 3)]);
}

/**
 * The controls of a replay over the token `nodes` of a sample. `mark(i)` hears the token that is now (null: all are shown),
 * `ended()` that the last one was played. Returns `node`, `show`, `play`, `stop` and `isOn`.
 */
function replay(sample, nodes, { mark, ended, memory }) {
  const count = nodes.length;
  let at = null;
  let timer = null;
  const readout = el('div', { class: 'chips readout', 'aria-live': 'off' });
  const button = el('button', { class: 'pick', type: 'button', onclick: () => (timer === null ? play() : stop()) }, '▶ replay');
  const slider = el('input', { type: 'range', min: 0, max: count, step: 1, 'aria-label': 'token', oninput: () => { stop(); show(Number(slider.value) || null); } });
  slider.value = count;
  const step = (by, sign, title) => el('button', { class: 'round', type: 'button', title, onclick: () => { stop(); show(Math.max(1, Math.min(count, (at ?? (by > 0 ? 0 : count + 1)) + by))); } }, sign);

  /** `number` tokens are there; null shows them all, as without a replay. */
  function show(shown) {
    nodes[at - 1]?.classList.remove('now');
    at = shown;
    nodes.forEach((node, k) => node.classList.toggle('later', at !== null && k >= at));
    slider.value = at ?? count;
    mark(at === null ? null : at - 1);
    if (at === null) { clear(readout); return; }
    nodes[at - 1].classList.add('now');
    const origin = isObserved(sample)(at - 1) ? 'observation: the policy read it' : null;
    clear(readout, el('span', { class: 'chip' }, el('small', null, `token ${at} of ${number(sample.length)}`), visible(sample.tokens[at - 1], true)),
      origin ? el('span', { class: 'names' }, origin) : readings(sample, at - 1).map(([name, value]) => el('span', { class: 'chip' }, el('small', null, name), value)));
  }
  function stop() {
    if (timer !== null) clearInterval(timer);
    timer = null;
    button.textContent = '▶ replay';
  }
  function play() {
    if (at === null || at >= count) show(null);
    button.textContent = '❚❚ pause';
    timer = setInterval(() => {
      if ((at ?? 0) < count) show((at ?? 0) + 1);
      else { stop(); ended(); }
    }, 1000 / Number(memory.speed ?? 12));
  }
  const speed = select('speed', SPEEDS, memory.speed ?? '12', (value) => { memory.speed = value; if (timer !== null) { stop(); play(); } });
  const node = el('div', { class: 'replay' }, el('div', { class: 'toolbar' }, button, el('span', null, step(-1, '‹', 'token before'), step(1, '›', 'next token')),
    el('label', { class: 'field' }, slider), speed, el('button', { class: 'link', type: 'button', onclick: () => { stop(); show(null); } }, 'show all')), readout);
  return { node, show, play, stop, isOn: () => at !== null };
}
