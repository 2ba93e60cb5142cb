"""TensorBoard, W&B, MLflow and Trackio: each a watcher that tells a service what metrics.jsonl says."""
