// Reads the responses of an exported file. What several responses say is in the file once; shared_values.py lists the forms.

// A function that returns the response to a path, or undefined; `file` is {shared: [value], responses: {path: value}}.
export function responsesOf(file) {
  const found = new Map(); // place -> value
  const shared = (place) => {
    if (!found.has(place)) found.set(place, restored(file.shared[place]));
    return found.get(place);
  };
  const sums = (steps) => {
    let sum = 0;
    return steps.map((step) => (sum += step));
  };
  const forms = {
    $: shared,
    $tokens: (places) => places.map(shared),
    $likeliest: (flat) => Array.from({ length: flat.length / 2 }, (_, at) => ({ ...shared(flat[2 * at]), logprob: flat[2 * at + 1] })),
    $same: ([value, count]) => new Array(count).fill(value),
    $sums: sums,
    $entries: (entries) => Object.fromEntries(entries.map(([name, value]) => [name, restored(value)])),
  };
  function restored(value) {
    if (Array.isArray(value)) return value.map(restored);
    if (value === null || typeof value !== "object") return value;
    const [form] = Object.keys(value);
    if (form !== undefined && form.startsWith("$")) return forms[form](value[form]);
    return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, restored(each)]));
  }
  return (path) => (Object.hasOwn(file.responses, path) ? restored(file.responses[path]) : undefined);
}
