// A page that follows a run: asks the server for the parts that have changed, and puts them into the page's data.

const LIVE_S = 1;

/** The page holds the tokens of so many steps; those between the first and the newest go. */
const HELD_STEPS = 40;

function mergeRollouts(old, fresh) {
  const steps = [...new Set([...old.steps, ...fresh.steps])].sort((a, b) => a - b);
  const merged = { ...old, steps, prompts: { ...old.prompts, ...fresh.prompts }, samples: { ...old.samples, ...fresh.samples }, pictures: { ...old.pictures, ...fresh.pictures }, counts: { ...old.counts, ...fresh.counts } };
  for (const step of steps.splice(1, Math.max(0, steps.length - HELD_STEPS))) delete merged.samples[step];
  return merged;
}

/** Puts a piece of news into the data; returns which parts of which stage changed (no stage: the run's head, or a new stage). */
function takeNews(data, { stage: id, explained: about, ...parts }) {
  Object.assign(data.explained, about);
  if (id === undefined) { Object.assign(data, parts); return {}; }
  const stage = data.stages.find((each) => each.id === id);
  if (!stage) { data.stages.push({ id, metrics: null, timing: null, alarms: null, health: null, rollouts: null, ...parts }); return { isNew: true }; }
  const { rollouts, ...replaced } = parts;
  Object.assign(stage, replaced);
  // In place: the viewer holds on to the rollouts it was made with.
  if (rollouts) stage.rollouts = stage.rollouts ? Object.assign(stage.rollouts, mergeRollouts(stage.rollouts, rollouts)) : rollouts;
  return { stage, kinds: Object.keys(parts) };
}

/** Asks again and again; `changed({stage, kinds})` hears what is new, `told(text, isLost)` how the connection is. */
function follow(data, changed, told) {
  let next = data.live;
  async function ask() {
    const answer = await fetch(`news?after=${next}`).then((found) => (found.ok ? found.json() : null)).catch(() => null);
    const isStale = answer?.news.some((piece) => piece.reload);
    // Another server answers: the whole page anew, once it can be had.
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
