"""Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow. One file for each."""
