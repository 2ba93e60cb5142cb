"""What every run needs, whichever loop it is of: its folder, checkpoints, journals, alarms, progress and pictures."""
