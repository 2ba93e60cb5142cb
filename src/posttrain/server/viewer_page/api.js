// The only module that asks for data: from the server, or from the responses that an exported file carries.
import { search } from "./address.js";
import { responsesOf } from "./exported_responses.js";

const TOKEN = "posttrain-token";
const embedded = document.getElementById("responses");
const embeddedResponse = embedded && responsesOf(JSON.parse(embedded.textContent));

export const exported = embedded !== null;

// What an exported file has of its runs: {rollouts, of, left_out}.
export const contents = exported ? embeddedResponse("export") : null;

// Take the token out of the address that the terminal printed; `#token=…&/run/0` also names a page.
export function keepToken() {
  const [, token, rest] = location.hash.match(/^#token=([^&]*)&?(.*)$/) || [];
  if (token === undefined) return;
  localStorage.setItem(TOKEN, token);
  history.replaceState(null, "", "#" + (rest || "/"));
}

export function pathOf(path, query = {}) {
  return path + search(query);
}

// The response to a path. An Error's message is one line for the reader.
export async function get(path) {
  if (exported) return fromFile(path);
  let response;
  try {
    response = await fetch(path, { headers: { "X-Posttrain-Token": localStorage.getItem(TOKEN) || "" } });
  } catch (error) {
    throw new Error("The viewer's server does not answer. Start it again with `posttrain view`.", { cause: error });
  }
  if (response.status === 403) throw new Error("Access denied. Open the address that the terminal shows.");
  if (!response.ok) throw new Error(await complaint(response));
  return response.json();
}

function fromFile(path) {
  const found = embeddedResponse(path);
  if (found !== undefined) return found;
  throw new Error("This file does not contain this page. Open the run folder with `posttrain view` to see it.");
}

async function complaint(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return error.message || error;
  } catch (notJson) {
    return `The server answered ${response.status}: ${text.slice(0, 200)}`;
  }
}
