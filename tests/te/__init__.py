"""What Transformer Engine, built without a device, shows on a CPU; see tools/te_check.sh."""
