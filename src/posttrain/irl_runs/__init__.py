"""Recovering a reward from demonstrations, as `posttrain irl` does it, and using what was found.

`recovery.run` goes from a recipe to a run folder; `environment` trains other libraries on a learned reward; `pictures`
draws.  The mathematics is in `posttrain.irl`.  Nothing here needs torch.
"""
