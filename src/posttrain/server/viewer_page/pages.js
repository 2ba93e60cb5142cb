// The pages of a run by their name in the address, and the tabs that lead to them. A further kind of page is one row here.
import { link } from "./address.js";
import { BehavioursView } from "./behaviours.js";
import { ComparePage } from "./compare.js";
import { GroupView } from "./group.js";
import { HeldOutView } from "./held_out.js";
import { OverviewPage } from "./overview.js";
import { ProblemsView, ProblemView } from "./problems.js";
import { RolloutView } from "./rollout.js";
import { RowsPage } from "./rollout_list.js";
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
};

// Pages of rollouts; runs of other kinds have the pages of their kind instead.
const WITH_ROLLOUTS = [
  { page: "rows", label: "Rollouts", holds: ["rows"] },
  { page: "problems", label: "Problems", holds: ["problems", "problem"] },
  { page: "held-out", label: "Held-out", holds: ["held-out"] },
  { page: "behaviours", label: "Behaviours", holds: ["behaviours"] },
];
const BY_KIND = { rl: WITH_ROLLOUTS };

export function tabsOf(run, runs) {
  const tabs = [{ page: "", label: "Overview", holds: ["", "step", "group", "rollout"] }, ...(BY_KIND[run.kind] || [])];
  const found = tabs.map((tab) => ({ ...tab, href: link(["run", run.run, tab.page].filter((part) => part !== "")) }));
  if (runs.length < 2) return found;
  const other = runs.find((one) => one.run !== run.run);
  return [...found, { page: "compare", label: "Compare", holds: ["compare"], href: link(["compare"], { a: run.run, b: other.run }) }];
}
