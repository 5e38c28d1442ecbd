"""Feeds Polar's rollouts to the Slime trainer: four hooks, named by Slime's own flags."""
