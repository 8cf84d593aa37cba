"""What keeps a long run alive or ends it: heartbeats, signals, restarts."""
