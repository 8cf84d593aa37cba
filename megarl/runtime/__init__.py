"""What surrounds the programs' loops: checks, set-up, steps, evaluation, files, the end."""
