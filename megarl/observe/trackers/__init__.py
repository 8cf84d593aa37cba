"""Where metrics go besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow. One file for each."""

# Name in --trackers -> its class, imported when it is opened: all but TensorBoard need the package of their name.
TRACKERS = {
    "tensorboard": "megarl.observe.trackers.tensorboard:TensorBoardTracker",
    "wandb": "megarl.observe.trackers.wandb_run:WandbTracker",
    "mlflow": "megarl.observe.trackers.mlflow_run:MlflowTracker",
}
