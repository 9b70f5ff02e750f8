"""What goes wrong in RL runs, looked for before a run begins: docs/doctor.md lists every check.

``checks.py`` reads text only and runs by itself with every run; ``examine.py`` samples, scores and rehearses an update
with the run's own roles, changes weights and takes that back, and says what the run will need; ``rewards.py`` scores
answers that the data know.
"""
