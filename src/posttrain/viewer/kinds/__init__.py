"""Pages of runs that are not `rl`: pairs, demonstrations, grids, comparisons and phases."""
