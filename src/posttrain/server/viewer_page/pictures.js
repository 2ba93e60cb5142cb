// Pictures that a run's folder has.
import { html, useState } from "./dom.js";
import { words } from "./format.js";
import { Loaded } from "./loading.js";

export function Picture({ run, name }) {
  const [open, setOpen] = useState(false);
  return html`<details onToggle=${(event) => setOpen(event.target.open)}><summary>Picture: ${words(name)}</summary>
    ${open && html`<${Loaded} path=${`/api/run/${run.run}/picture/${name}`} lines=${4}>
      ${(found) => found.png && html`<img class="picture" src=${"data:image/png;base64," + found.png} alt=${`picture: ${words(name)}`} />`}<//>`}</details>`;
}
