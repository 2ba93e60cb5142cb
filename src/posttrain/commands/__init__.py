"""The commands of the `posttrain` program; cli.py imports only the module of the one that is run."""

COMMANDS = {
    "new": ("new", "make a folder with rows, a reward and a recipe for your own problem"),
    "rl": ("train.rl", "train a model by reward"),
    "sft": ("train.sft", "train a model on your rows, or a small one from scratch"),
    "dpo": ("train.dpo", "train a model on pairs of answers of which one is better"),
    "reward-model": ("train.reward_model", "train a reward model on pairs of answers"),
    "collect": ("collect", "make pairs of completions and have them judged: by rewards, a language model or people"),
    "irl": ("train.irl", "find the reward behind demonstrations"),
    "launch": ("launch", "start a run with its servers, on this machine or as commands for several"),
    "phases": ("phases", "run phases of one recipe one after another, such as sft, reward model, rl"),
    "compare": ("compare", "run recipes at an equal budget, several seeds each, side by side"),
    "view": ("view", "look at runs in a browser: every step, completion and token"),
    "behaviours": ("behaviours", "show how often a run's completions check, go back or try again, over training"),
    "eval": ("evaluate", "measure a model on problems that are held out from training"),
    "chat": ("chat", "ask a model by hand"),
    "serve": ("serve", "serve a model at an OpenAI-compatible endpoint"),
    "replay": ("train.replay", "train a run again from its rollout files, and compare the weights to the bit"),
    "trace": ("trace", "show one rollout token by token: state, action, log-prob, reward, advantage"),
    "plan": ("plan.show_plan", "show the memory of a recipe, before anything is loaded"),
    "check-task": ("check_task", "show what a reward pays for right answers and for cheap tricks"),
    "course": ("course", "work with the lessons: notebooks, mistakes, and a check of your own functions"),
    "doctor": ("doctor", "show what this machine has, and whether it can run programs safely"),
    "config": ("plan.show_recipe", "print the recipe that recipes and flags make"),
    "completion": ("completion", "print the completion of commands, flags and recipes for bash, zsh or fish"),
}
"""Name -> module in this package, with its function unless that is `main`; and what it does."""
