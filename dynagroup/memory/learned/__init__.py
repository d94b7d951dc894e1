"""What XGBoost has learned about memory."""
