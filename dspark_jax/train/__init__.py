"""Training: a target from text, and a drafter from a target."""
