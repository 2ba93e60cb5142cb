"""The commands of the `posttrain` program; cli.py imports only the module of the one that is run."""

COMMANDS = {
    "new": ("new", "make a folder with rows, a reward and a recipe for your own problem"),
    "rl": ("train.rl", "train a model by reward"),
    "sft": ("train.sft", "train a model on your rows, or a small one from scratch"),
    "dpo": ("train.dpo", "train a model on pairs of answers: one preferred, one rejected"),
    "reward-model": ("train.reward_model", "train a reward model on pairs of answers"),
    "collect": ("collect", "sample pairs of completions and have them judged by rewards, a language model or people"),
    "irl": ("train.irl", "find the reward behind demonstrations"),
    "launch": ("launch", "start a run with its servers, on this machine or as commands for several"),
    "phases": ("phases", "run the phases of a recipe one after another, such as sft, reward model, rl"),
    "compare": ("compare", "run recipes at an equal budget, several seeds each, side by side"),
    "view": ("view", "look at runs in a browser: every step, completion and token"),
    "behaviours": ("behaviours", "show how often a run's completions check, go back or try again, over training"),
    "eval": ("evaluate", "evaluate a model on held-out problems"),
    "chat": ("chat", "chat with a model in the terminal"),
    "serve": ("serve", "serve a model at an OpenAI-compatible endpoint"),
    "replay": ("train.rerun", "repeat a run's training from its rollout files, and compare the weights bit for bit"),
    "trace": ("trace", "show one rollout token by token: state, action, log-prob, reward, advantage"),
    "plan": ("plan.show_plan", "estimate the memory of a recipe without loading the model"),
    "check-task": ("check_task", "show what a reward pays for correct answers and for cheap tricks"),
    "course": ("course", "work with the lessons: notebooks, mistakes, and a check of your own functions"),
    "doctor": ("doctor", "show what this machine has, and whether it can run programs safely"),
    "config": ("plan.show_recipe", "print the full recipe that results from recipes and flags"),
    "completion": ("completion", "print a completion script for bash, zsh or fish"),
}
"""Name -> module in this package (with its function, if not `main`), and what the command does."""
