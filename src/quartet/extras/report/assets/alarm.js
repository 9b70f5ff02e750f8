// Banners: the reward-hacking alarm with the answers that show it, and what the checks of the run's health have found.

function alarmBanner(stage, many) {
  const { alarms } = stage;
  const steps = alarms.steps.length > 1 ? `Raised at steps ${alarms.steps.map((step) => number(step)).join(', ')}. ` : '';
  return el('section', { class: 'alarm', role: 'alert' },
    el('div', { class: 'card' }, el('h2', null, many ? `Reward hacking? (${titleOf(stage.id)})` : 'Reward hacking?'),
      el('p', null, alarms.text), el('p', { class: 'dim' }, `${steps}Held-out prompts whose score fell, those first whose training reward rose most:`)),
    alarms.examples.length > 0 ? examplesTable(alarms.examples) : missing('No answers were kept.'));
}

const alarmBanners = (data) => data.stages.filter((stage) => stage.alarms).map((stage) => alarmBanner(stage, data.stages.length > 1));

/** What was found, since when, what it means and what to try. */
function healthBanner(stage, many) {
  const when = ({ since, until }) => (until === null ? `since step ${number(since)}` : `steps ${number(since)} to ${number(until)}`);
  return el('section', { class: 'alarm health', role: 'alert' }, el('div', { class: 'card' },
    el('h2', null, many ? `Not well (${titleOf(stage.id)})` : 'Not well'),
    stage.health.map((found) => [el('p', null, el('b', null, `${found.title}, ${when(found)}`),
      el('span', { class: 'dim' }, ` ${Object.entries(found.values).map(([name, value]) => `${name} ${number(value)}`).join(', ')}`)),
    el('p', null, `${found.meaning} `, el('b', null, 'Try: '), `${found.remedy}.`)])));
}

const healthBanners = (data) => data.stages.filter((stage) => stage.health).map((stage) => healthBanner(stage, data.stages.length > 1));
