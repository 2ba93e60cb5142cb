"""What every kind of run needs: folder, checkpoints, journals, alarms, progress and pictures."""
