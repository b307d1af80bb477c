/* The form of choose.md: looks answers up in the table that docs/site/chooser.py has made. */
"use strict";
{
  const form = document.getElementById("chooser");
  const table = JSON.parse(document.getElementById("chooser-table").textContent);
  const names = Object.keys(table.settings);
  const part = name => form.querySelector(`.chooser-${name}`);

  const chosen = () => Object.fromEntries(names.map(name => [name, Number(form.elements[name].value)]));

  /* The answers follow each other as the settings do, but for the error's: each answer has all errors. */
  const answer = place => {
    let index = 0;
    for (const name of names.filter(name => name !== "error"))
      index = index * table.settings[name].length + place[name];
    const row = table.answers[index];
    const [way, gain, time, error] = row[1 + place.error];
    const [codec, algorithm] = way < 0 ? [null, "native"] : table.ways[way];
    return {codec, algorithm, gain, time: time ?? row[0], error, native: row[0]};
  };

  const show = () => {
    const place = chosen();
    for (const name of names) {
      const field = form.elements[name];
      if (field.type !== "range") continue;
      const text = field.dataset.texts.split("|")[place[name]];
      field.setAttribute("aria-valuetext", text);
      field.nextElementSibling.textContent = text;
    }
    const value = Object.fromEntries(names.map(name => [name, table.settings[name][place[name]]]));
    const found = answer(place);
    part("answer").textContent = found.codec === null
      ? "Uncompressed: no codec within this error is predicted to be at least 5 % faster than MPI's own allreduce."
      : `${found.codec} by ${found.algorithm}: predicted ${found.gain} × faster than MPI's own allreduce.`;
    const ranks = value.nodes * value["per-node"];
    const figures = [["Ranks", ranks], ["MPI's own, predicted", found.native]];
    if (found.codec !== null)
      figures.push(["compcoll, predicted", found.time], ["Error, estimated", found.error]);
    part("figures").replaceChildren(...figures.map(([name, text]) => {
      const group = document.createElement("div");
      group.append(document.createElement("dt"), document.createElement("dd"));
      group.firstChild.textContent = name;
      group.lastChild.textContent = text;
      return group;
    }));
    const perNode = value["per-node"] > 1 ? ` --ranks-per-node ${value["per-node"]}` : "";
    part("command").textContent = `python -m compcoll choose --bytes ${value.bytes} --link ${value.link} \\\n`
      + `    --ranks ${ranks}${perNode} --error ${value.error} --profile defaults`;
    part("call").textContent = `compcoll.allreduce(x, codec="auto", tolerance=${value.error})`;
  };

  form.addEventListener("input", show);
  form.addEventListener("submit", event => event.preventDefault());
  form.hidden = false;
  show();
}
