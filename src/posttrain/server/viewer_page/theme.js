// Light, dark, or as the system says; remembered on this machine.
import { useEffect, useState } from "./dom.js";

const KEY = "posttrain-theme";
const NEXT = { system: "light", light: "dark", dark: "system" };
const CHANGED = "posttrain-theme-changed";

export function theme() {
  return localStorage.getItem(KEY) || "system";
}

export function useThemeChoice() {
  const [chosen, setChosen] = useState(theme());
  useEffect(() => {
    document.documentElement.dataset.theme = chosen;
    localStorage.setItem(KEY, chosen);
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
