// A page that follows a run: asks the server for what is new, and merges it into the page's data by step.

const LIVE_S = 1;

/** Columns (`steps` and whatever has a value for each of them) with those of `fresh` put in the place of their steps. */
function mergeColumns(old, fresh, names) {
  const steps = [...new Set([...old.steps, ...fresh.steps])].sort((a, b) => (a === null ? -1 : b === null ? 1 : a - b));
  const place = (list) => new Map(list.map((step, i) => [step, i]));
  const [before, now] = [place(old.steps), place(fresh.steps)];
  const merge = (a, b, gap) => steps.map((step) => (now.has(step) ? b?.[now.get(step)] : undefined) ?? (before.has(step) ? a?.[before.get(step)] : undefined) ?? gap);
  const merged = { ...old, steps };
  for (const [name, gap] of names) {
    const [a, b] = [old[name], fresh[name]];
    merged[name] = Array.isArray(a) ? merge(a, b, gap)
      : Object.fromEntries([...new Set([...Object.keys(a), ...Object.keys(b)])].map((key) => [key, merge(a[key], b[key], gap)]));
  }
  return merged;
}

const MERGES = {
  metrics: (old, fresh) => mergeColumns(old, fresh, [['series', null]]),
  timing: (old, fresh) => ({ ...mergeColumns(old, fresh, [['seconds', 0], ['tokens', 0], ['wall_s', 0], ['busy_s', 0]]),
    names: [...new Set([...old.names, ...fresh.names])], detail: { ...old.detail, ...fresh.detail }, workers: fresh.workers }),
  rollouts: (old, fresh) => ({ ...old, steps: [...new Set([...old.steps, ...fresh.steps])].sort((a, b) => a - b),
    prompts: { ...old.prompts, ...fresh.prompts }, samples: { ...old.samples, ...fresh.samples }, counts: { ...old.counts, ...fresh.counts } }),
  alarms: (old, fresh) => fresh,
  health: (old, fresh) => fresh,
};

/** The page holds so many steps with timelines, and with tokens; those between the first and the newest go. */
const HELD = { timing: 60, rollouts: 40 };
function forget(kind, part) {
  const [table, keys] = kind === 'timing' ? [part.detail, Object.keys(part.detail)] : [part.samples, part.steps.map(String)];
  const gone = keys.slice(1, Math.max(1, keys.length - HELD[kind] + 1));
  for (const key of gone) delete table[key];
  if (kind === 'rollouts') part.steps = part.steps.filter((step) => !gone.includes(String(step)));
  return part;
}

/** Puts a piece of news into the data; returns which parts of which stage changed (no stage: the run's head, or a new stage). */
function takeNews(data, { stage: id, explained: about, whole, ...parts }) {
  Object.assign(data.explained, about);
  if (id === undefined) { Object.assign(data, parts); return {}; }
  const stage = data.stages.find((each) => each.id === id);
  if (!stage) { data.stages.push(whole ?? { id, metrics: null, timing: null, alarms: null, health: null, rollouts: null, ...parts }); return { isNew: true }; }
  for (const [kind, fresh] of Object.entries(whole ? {} : parts)) {
    const merged = stage[kind] && fresh ? MERGES[kind](stage[kind], fresh) : fresh;
    // In place: the viewer holds on to the rollouts it was made with.
    stage[kind] = stage[kind] && kind === 'rollouts' ? Object.assign(stage[kind], forget(kind, merged)) : kind in HELD ? forget(kind, merged) : merged;
  }
  return { stage, kinds: Object.keys(parts) };
}

/** Asks again and again; `changed({stage, kinds})` hears what is new, `told(text, isLost)` how the connection is. */
function follow(data, changed, told) {
  let next = data.live;
  async function ask() {
    const answer = await fetch(`news?after=${next}`).then((found) => (found.ok ? found.json() : null)).catch(() => null);
    const isStale = answer?.news.some((piece) => piece.reload);
    // What the run has cut back: the whole page anew, once it can be had.
    if (isStale && await fetch('.').then((found) => found.ok).catch(() => false)) { location.reload(); return; }
    const isLost = !answer || isStale;
    if (!isLost) {
      next = answer.next;
      for (const piece of answer.news) changed(takeNews(data, piece));
    }
    const isOver = data.run.status && data.run.status !== 'running';
    told(isLost ? 'no connection: the page keeps what it has, and goes on asking' : isOver ? 'live · the run has ended' : 'live', isLost);
    const wait = isLost || isOver ? 3 * LIVE_S : LIVE_S;
    root.dataset.polls = String(Number(root.dataset.polls ?? 0) + 1);
    setTimeout(ask, 1000 * wait);
  }
  setTimeout(ask, 1000 * LIVE_S);
}
