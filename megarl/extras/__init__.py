"""What a reader may skip: the report of a run, and trackers other than TensorBoard. No other room imports it early."""
