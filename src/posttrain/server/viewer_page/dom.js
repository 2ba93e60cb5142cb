// Preact, its hooks and htm under the names that the other modules import. The vendored files are plain scripts that set globals.
const { preact, preactHooks, htm } = globalThis;

export const html = htm.bind(preact.h);
export const mount = preact.render;
export const useState = preactHooks.useState;
export const useEffect = preactHooks.useEffect;
export const useLayoutEffect = preactHooks.useLayoutEffect;
export const useMemo = preactHooks.useMemo;
export const useRef = preactHooks.useRef;
