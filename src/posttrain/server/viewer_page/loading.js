// Responses in components: what is shown stays while a newer response is on its way, so a live run never loses one's place.
import { get } from "./api.js";
import { html, useEffect, useRef, useState } from "./dom.js";
import { Fault, Skeleton } from "./parts.js";

const KEPT = 60;
const kept = new Map(); // path -> its last response, most recent last

function keep(path, response) {
  kept.delete(path);
  kept.set(path, response);
  if (kept.size > KEPT) kept.delete(kept.keys().next().value);
}

// {data, error, stale}: `version` changes when files of the run grew, and asks again.
export function useResponse(path, version = 0) {
  const [found, setFound] = useState({ path: null });
  const last = useRef(null);
  const wanted = useRef(path);
  wanted.current = path;
  useEffect(() => () => { wanted.current = null; }, []);
  useEffect(() => {
    if (!path) return;
    get(path).then(
      (data) => {
        keep(path, data);
        const text = JSON.stringify(data);
        if (wanted.current !== path || last.current === path + text) return;
        last.current = path + text;
        setFound({ path, data });
      },
      (error) => {
        last.current = null;
        if (wanted.current === path) setFound({ path, data: kept.get(path), error: error.message });
      },
    );
  }, [path, version]);
  if (found.path === path) return { data: found.data, error: found.error, stale: false };
  return { data: kept.get(path), error: undefined, stale: true };
}

// Shows `children(data)` once there is a response, and one quiet line where there is an error.
export function Loaded({ path, version, lines = 6, children }) {
  const { data: found, error, stale } = useResponse(path, version);
  const before = useRef(undefined);
  if (found) before.current = found;
  if (error && !found) return html`<${Fault} text=${error} />`;
  const data = found || (stale && before.current); // the page before this one, until its successor is here
  if (!data) return html`<${Skeleton} lines=${lines} />`;
  const faults = [...(error ? [error] : []), ...(data.faults || [])];
  const onlyFaults = Object.keys(data).join() === "faults"; // a file that cannot be read has nothing else
  return html`<div class="response" inert=${!found}>${faults.map((text) => html`<${Fault} text=${text} />`)}${!onlyFaults && children(data)}</div>`;
}

const POLL_MS = 2000;

// A number that changes when the run's files grew; null while it is not known.
export function useVersion(run, live) {
  const [version, setVersion] = useState(0);
  useEffect(() => {
    if (run === null || !live) return undefined;
    let last = null;
    let ended = false;
    async function poll() {
      try {
        const state = await get(`/api/run/${run}/state`);
        if (last !== null && state.version !== last && !ended) setVersion((number) => number + 1);
        last = state.version;
      } catch (error) {
        console.info(error.message); // the next poll tries again; the page keeps what it has
      }
    }
    poll();
    const timer = setInterval(poll, POLL_MS);
    return () => { ended = true; clearInterval(timer); };
  }, [run, live]);
  return version;
}
