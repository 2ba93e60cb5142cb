// Light, dark, or as the system says; remembered on this machine.
import { useEffect, useState } from "./dom.js";

const KEY = "posttrain-theme";
const NEXT = { system: "light", light: "dark", dark: "system" };
const CHANGED = "posttrain-theme-changed";

// A page in a notebook's frame may not keep anything.
const store = location.protocol === "about:" ? { getItem: () => null, setItem: () => null } : localStorage;

export function theme() {
  return store.getItem(KEY) || "system";
}

export function useThemeChoice() {
  const [chosen, setChosen] = useState(theme());
  useEffect(() => {
    document.documentElement.dataset.theme = chosen;
    store.setItem(KEY, chosen);
    dispatchEvent(new Event(CHANGED));
  }, [chosen]);
  return [chosen, () => setChosen((now) => NEXT[now] || "light")];
}

// A number that changes when the colours do: pictures on a canvas are drawn again.
export function useThemeVersion() {
  const [version, setVersion] = useState(0);
  useEffect(() => {
    const changed = () => setVersion((number) => number + 1);
    const system = matchMedia("(prefers-color-scheme: dark)");
    system.addEventListener("change", changed);
    addEventListener(CHANGED, changed);
    return () => { system.removeEventListener("change", changed); removeEventListener(CHANGED, changed); };
  }, []);
  return version;
}
