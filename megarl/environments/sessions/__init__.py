"""Sessions: episodes of a training run that drivers outside of it begin and end over HTTP (`--agent-sessions`)."""
