"""What a run records, and what people see of it: events, heartbeat, summary, display."""
