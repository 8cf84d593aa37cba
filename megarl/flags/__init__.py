"""megarl's own flags: what there is, config files, what goes together, roles' prefixes."""
