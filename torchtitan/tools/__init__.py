"""What every layer may use: logging, error types, facts about the device, requests to stop."""
