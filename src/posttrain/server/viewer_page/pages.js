// The pages of a run by their name in the address, and the tabs that lead to them. A further kind of page is one row here.
import { link } from "./address.js";
import { BehavioursView } from "./behaviours.js";
import { ComparePage } from "./compare.js";
import { DemonstrationsPage } from "./demonstrations.js";
import { GridPage } from "./grid.js";
import { GroupView } from "./group.js";
import { HeldOutView } from "./held_out.js";
import { OverviewPage } from "./overview.js";
import { PairsPage } from "./pair_list.js";
import { ProblemsView, ProblemView } from "./problems.js";
import { RolloutView } from "./rollout.js";
import { RowsPage } from "./rollout_list.js";
import { ComparisonPage, PhasesPage } from "./run_tables.js";
import { StepView } from "./step.js";

export const pages = {
  "": OverviewPage,
  step: StepView,
  group: GroupView,
  rollout: RolloutView,
  rows: RowsPage,
  problems: ProblemsView,
  problem: ProblemView,
  "held-out": HeldOutView,
  behaviours: BehavioursView,
  compare: ComparePage,
  pairs: PairsPage,
  demonstrations: DemonstrationsPage,
  grid: GridPage,
  comparison: ComparisonPage,
  phases: PhasesPage,
};

// Pages of rollouts; runs of other kinds have the pages of their kind instead.
const WITH_ROLLOUTS = [
  { page: "rows", label: "Rollouts", holds: ["rows"] },
  { page: "problems", label: "Problems", holds: ["problems", "problem"] },
  { page: "held-out", label: "Held-out", holds: ["held-out"] },
  { page: "behaviours", label: "Behaviours", holds: ["behaviours"] },
];
const PAIRS = { page: "pairs", label: "Pairs", holds: ["pairs"] };
const BY_KIND = {
  rl: WITH_ROLLOUTS,
  dpo: [PAIRS, ...WITH_ROLLOUTS],
  "reward-model": [PAIRS],
  collect: [PAIRS],
  sft: [{ page: "demonstrations", label: "Demonstrations", holds: ["demonstrations"] }],
  irl: [{ page: "grid", label: "World", holds: ["grid"] }],
};

// Commands that make several runs have their table in place of an overview.
const FIRST = { compare: { label: "Comparison", component: ComparisonPage }, phases: { label: "Phases", component: PhasesPage } };

export function pageOf(run, name) {
  return name === "" && run.kind in FIRST ? FIRST[run.kind].component : pages[name];
}

export function tabsOf(run, runs) {
  const label = run.kind in FIRST ? FIRST[run.kind].label : "Overview";
  const tabs = [{ page: "", label, holds: ["", "step", "group", "rollout", "comparison", "phases"] }, ...(BY_KIND[run.kind] || [])];
  const found = tabs.map((tab) => ({ ...tab, href: link(["run", run.run, tab.page].filter((part) => part !== "")) }));
  const other = runs.find((one) => one.run !== run.run && one.kind === run.kind);
  if (!other || run.kind in FIRST) return found;
  return [...found, { page: "compare", label: "Compare", holds: ["compare"], href: link(["compare"], { a: run.run, b: other.run }) }];
}
